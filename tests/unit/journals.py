"""Journals for doctor, written for these tests: each kind of fault, and machines that are well.

`TEXTS` has every error text this project knows from its sources, with the fault it belongs to; the
words of the error are the programs' own, what stands around them is made up. `STORIES` are whole
journals: what happened, and what doctor must say first.
"""

from dataclasses import dataclass

from dsv4.journal import Line

VLLM = "(EngineCore pid=1470) ERROR 12-01 01:50:11 [core.py:812] "
CUDA_FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.1 GiB free"

TEXTS: tuple[tuple[str, str], ...] = (
    # Memory
    (
        "refused memory",
        f"{VLLM}ValueError: Free memory on device cuda:0 (86.8/121.69 GiB) on startup is less than"
        " desired GPU memory utilization (0.88, 107.09 GiB).",
    ),
    ("driver's memory query failed", f"{VLLM}torch.AcceleratorError in mem_get_info: CUDA error"),
    ("driver's memory query failed", "cudaMemGetInfo failed: unknown error"),
    (
        "memory moved while it profiled",
        f"{VLLM}AssertionError: Error in memory profiling. Initial free memory 101.2 GiB, current"
        " free memory 103.0 GiB.",
    ),
    ("no room for the KV cache", f"{VLLM}ValueError: No available memory for the cache blocks."),
    (
        "no room for the KV cache",
        "ValueError: The model's max seq len (262144) is larger than the maximum number of tokens"
        " that can be stored in KV cache (84554).",
    ),
    (
        "no room for the KV cache",
        "ValueError: To serve at least one request, (9.1 GiB KV cache is needed, which is larger"
        " than the available KV cache memory (2.0 GiB).",
    ),
    ("out of memory", f"{VLLM}torch.OutOfMemoryError: {CUDA_FULL}"),
    ("out of memory", f"RuntimeError: {CUDA_FULL}"),
    (
        "memory pinned by the driver",
        "dsv4 memory_gate: wanted 108.6 GiB free (0.88 x 121.6 + 1.5), have 52.0 GiB; 50.1 GiB are"
        " held by no process and no cache: pinned by the driver, reboot needed; the highest",
    ),
    (
        "kernel keeps memory for handover",
        "dsv4 memory_gate: wanted 108.6 GiB free, have 88.0; CmaFree is above CmaTotal, the mark of"
        " a kernel that keeps memory for handover",
    ),
    ("the memory gate refused", "dsv4 memory_gate: wanted 108.6 GiB free, have 30.0 GiB (MemFree)"),
    (
        "killed by the watchdog",
        "dsv4 watchdog: dsv4.service killed: 3.10 GiB available, the hard floor is 3.50",
    ),
    (
        "killed by the watchdog",
        "dsv4 watchdog: dsv4.service asked to stop: 4.81 GiB available, at or below the soft floor",
    ),
    ("killed by the kernel", "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:1kB"),
    ("killed by the kernel", "dsv4.service: Failed with result 'oom-kill'."),
    (
        "killed by systemd-oomd",
        "Killed /user.slice/user-1000.slice/session-3.scope due to memory pressure for /user.slice",
    ),
    (
        "page cache does not go",
        "dsv4 cache_drop: dropped 0.00 GiB of the pack in 0.10 s, 90.1 GiB stay; still mapped by"
        " pid 77 (python)",
    ),
    ("a compiler was killed", "g++: fatal error: Killed signal terminated program cc1plus"),
    ("a compiler was killed", "ninja: build stopped: subcommand Killed"),
    # The engine
    (
        "ptxas is too old",
        "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
    ),
    (
        "ninja or nvcc not found",
        f"{VLLM}FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
    ),
    ("ninja or nvcc not found", f"{VLLM}RuntimeError: Could not find nvcc and default cuda_home"),
    ("ninja or nvcc not found", "RuntimeError: Ninja is required to load C++ extensions"),
    ("torch without CUDA", f"{VLLM}AssertionError: Torch not compiled with CUDA enabled"),
    (
        "torch without CUDA",
        "dsv4 build: after installing the locked packages torch is for the processor, wanted CUDA",
    ),
    (
        "two CUDA toolkits are mixed",
        "#error: compiler and CUDA toolkit headers are incompatible, check your configuration",
    ),
    (
        "two CUDA toolkits are mixed",
        "RuntimeError: The detected CUDA version (12.8) mismatches the version that was used to"
        " compile PyTorch (13.0).",
    ),
    (
        "two CUDA toolkits are mixed",
        "dsv4 build: CUDA_HOME: /usr/local/cuda/bin/nvcc is of release 12.8, wanted from 13.0 and",
    ),
    (
        "no attention backend",
        f"{VLLM}ValueError: No valid attention backend found for cuda with AttentionSelectorConfig",
    ),
    (
        "a weight has no place in the model",
        f"{VLLM}ValueError: There is no module or parameter named 'vision' in the model",
    ),
    ("a weight has no place in the model", f"{VLLM}KeyError: 'layers.0.ffn.gate.bias_vl'"),
    (
        "draft weights have no place",
        f"{VLLM}KeyError: 'model.layers.43.ffn.experts.w13_weight_scale'",
    ),
    (
        "output projection wants FP8 scales",
        f"{VLLM}AttributeError: 'ColumnParallelLinear' object has no attribute 'weight_scale_inv'",
    ),
    (
        "patched for another FlashInfer",
        f"{VLLM}TypeError: _trtllm_batch_decode_sparse_mla_sm120() missing 1 required"
        " keyword-only argument: 'lse_scale'",
    ),
    (
        "window too wide for the kernel",
        f"{VLLM}RuntimeError: no specialisation for (64, 192), see flashinfer-ai/flashinfer#4380",
    ),
    (
        "the draft proposes too much",
        "ValueError: num_speculative_tokens:4 must be divisible by n_predict=3",
    ),
    (
        "an empty text_config",
        "ValueError: The text_config extracted from the model config does not have"
        " `num_attention_heads` attribute.",
    ),
    (
        "FP8 claims the model",
        "(EngineCore pid=9) INFO 12-01 01:50:00 [core.py:123] Initializing a V1 LLM engine with"
        " config: model='x', quantization=deepseek_v4_fp8, seed=0",
    ),
    (
        "unknown quantisation",
        "ValueError: Unknown quantization method: exl3. Must be one of ['fp8']",
    ),
    (
        "the extension does not import",
        "ImportError: libc10.so: cannot open shared object file: No such file or directory",
    ),
    ("the extension does not import", "ModuleNotFoundError: No module named 'exllamav3_ext'"),
    (
        "extension and plugin do not fit",
        "TypeError: exl3_moe(): incompatible function arguments. The following are supported:",
    ),
    (
        "renamed registries",
        "ImportError: cannot import name 'TOOL_PARSER_REGISTRY' from 'vllm.tool_parsers'",
    ),
    ("renamed registries", "ImportError: cannot import name 'REASONING_PARSER_REGISTRY'"),
    ("a step took too long", f"{VLLM}TimeoutError: RPC call to execute_model timed out."),
    (
        "the engine's own start limit",
        "(APIServer pid=1) ERROR 12-01 02:00:00 [core_client.py:717] TimeoutError: Timed out"
        " waiting for engine core processes to start.",
    ),
    (
        "Python's headers are missing",
        "main.c:5:10: fatal error: Python.h: No such file or directory",
    ),
    ("no compiler", "torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found"),
    ("no compiler", "RuntimeError: Failed to find C compiler. Please specify via CC environment"),
    (
        "libnuma is missing",
        "ImportError: libnuma.so.1: cannot open shared object file: No such file or directory",
    ),
    ("an illegal instruction", "dsv4.service: Main process exited, code=dumped, status=4/ILL"),
    (
        "no code for this GPU",
        "CUDA error: no kernel image is available for execution on the device",
    ),
    ("not a multimodal model", "ValueError: DSV4-Flash is not a multimodal model"),
    (
        "a prompt was too long",
        "ValueError: This model's maximum context length is 65536 tokens. However, you requested 9",
    ),
    # The GPU
    ("driver and library differ", "Failed to initialize NVML: Driver/library version mismatch"),
    (
        "driver and library differ",
        "NVRM: API mismatch: the client has the version 580.95.05, but this kernel module has",
    ),
    ("the GPU cannot be reached", f"{VLLM}RuntimeError: Found no NVIDIA driver on your system."),
    ("the GPU cannot be reached", f"{VLLM}RuntimeError: No CUDA GPUs are available"),
    ("the GPU cannot be reached", f"{VLLM}CUDA error: initialization error"),
    (
        "the GPU cannot be reached",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    ),
    ("the GPU reported an error", "NVRM: Xid (PCI:000f:01:00): 119, pid=1470, Timeout waiting"),
    # The pack
    (
        "weight files cannot be served",
        "dsv4 launch: /var/lib/dsv4/views/current: 2 of 48 weight files cannot be served: a is",
    ),
    *(
        (
            "no safetensors file",
            f"{VLLM}safetensors_rust.SafetensorError: Error while deserializing header: {words}",
        )
        for words in (
            "header too large",
            "header too small",
            "invalid header length",
            "invalid JSON in header: expected value",
            "HeaderTooLarge",
        )
    ),
    *(
        (
            "a shard was cut short",
            f"{VLLM}safetensors_rust.SafetensorError: Error while deserializing header: {words}",
        )
        for words in (
            "incomplete metadata, file not fully covered",
            "MetadataIncompleteBuffer",
            "invalid shape, data type, or offset for tensor",
        )
    ),
    (
        "a shard is missing",
        f'{VLLM}FileNotFoundError: No such file or directory: "model-00007-of-00048.safetensors"',
    ),
    (
        "configuration and shards disagree",
        "dsv4 pack_config: config.json and shards disagree on bits (layer 3: 2 and 3); verify",
    ),
    (
        "configuration and shards disagree",
        "ValueError: head_bits 5 is invalid, must be one of 6, 8, 16",
    ),
    ("unknown trellis", "ValueError: mcg marker mismatch: expected -877912083"),
    ("unknown trellis", "AssertionError: mixed trellis widths in layer 3"),
    ("code in the pack", "dsv4 fetch: owner/pack: holds program code (modeling.py), which a model"),
    # The download
    ("terms not accepted", "huggingface_hub.errors.GatedRepoError: 403 Client Error."),
    ("terms not accepted", "Cannot access gated repo for url https://hub/owner/pack/resolve/main"),
    (
        "terms not accepted",
        "dsv4 fetch: owner/pack: the token is good, but its account has not accepted the terms of",
    ),
    ("the token is not accepted", "requests.exceptions.HTTPError: 401 Client Error: Unauthorized"),
    ("the token is not accepted", "httpx.LocalProtocolError: Illegal header value b'Bearer '"),
    (
        "the token is not accepted",
        "dsv4 fetch: http://hub: does not accept the token (mistyped, expired or revoked); make a",
    ),
    ("the hub limits requests", "HTTP Error 429 thrown: Too Many Requests for url"),
    (
        "the transfer stalls",
        "dsv4 fetch: model-00001-of-00048.safetensors: nothing arrived for 60 s",
    ),
    ("the transfer stalls", "dsv4 fetch: the xet transfer stalled; going on over HTTP"),
    ("bytes are not the hub's", "OSError: Consistency check failed: file should be of size 12 but"),
    ("bytes are not the hub's", "dsv4 fetch: config.json: not what the hub has; only this file is"),
    ("bytes are not the hub's", "error: Hash mismatch for `shellingham==1.5.4`"),
    ("the disk is full", "OSError: [Errno 28] No space left on device"),
    ("the disk is full", "UserWarning: Not enough free disk space to download the file."),
    ("the disk is full", "dsv4 fetch: /var/lib/dsv4/packs/x: the disk is full; free some space"),
    (
        "the clock is off",
        "E: Release file for http://deb/InRelease is not valid yet (invalid for 3h)",
    ),
    ("the clock is off", "ssl.SSLCertVerificationError: certificate is not yet valid"),
    ("the hub cannot be reached", "urllib3: Temporary failure in name resolution"),
    ("the hub cannot be reached", "dsv4 fetch: http://hub: cannot be reached: connection refused"),
    (
        "a cache of somebody else's",
        "PermissionError: [Errno 13] Permission denied: '/root/.cache/huggingface/hub'",
    ),
    ("hf is not found", "bash: hf: command not found"),
    # The build
    (
        "x86 code on aarch64",
        "moe_mul1.cpp:12:10: fatal error: immintrin.h: No such file or directory",
    ),
    ("x86 code on aarch64", 'all_reduce_cpu.cu(111): error: identifier "__builtin_ia32_pause"'),
    ("x86 code on aarch64", "avx2_target.cpp:9: '__builtin_cpu_supports' was not declared"),
    (
        "a patch does not fit",
        "dsv4 build: nothing was changed: wide_swa drifted: looked for one call",
    ),
    ("a patch does not fit", "SystemExit: expected one x86 pause block, found 0"),
    (
        "the plugin is on no index",
        "ERROR: No matching distribution found for vllm-exl3>=0.3.1",
    ),
    ("requirements that cannot be met", "ERROR: ResolutionImpossible: for help visit the page"),
    ("requirements that cannot be met", "No solution found when resolving dependencies:"),
    (
        "files damaged after the install",
        "dsv4 build: 2 files are damaged after the install, first: x.py differs from its RECORD",
    ),
    (
        "compiling beside the model",
        "dsv4 build: compiling needs 3.5 GiB beside the served model, 6.0 GiB are available",
    ),
    ("a venv without pip", "The virtual environment was not created: ensurepip is not available."),
    ("a venv without pip", "sh: 1: pip: not found"),
    ("checkout of another owner", "fatal: --local can only be used inside a git repository"),
    ("checkout of another owner", "fatal: detected dubious ownership in repository at '/srv/x'"),
    # The service
    (
        "restarts given up",
        "dsv4 launch: no further start: 3 automatic restarts in 120 minutes did not help; last: a",
    ),
    (
        "the watchdog does not run",
        "dsv4 launch: dsv4-watchdog.service does not run, and nothing else keeps this machine from",
    ),
    ("the port is taken", "OSError: [Errno 98] Address already in use"),
    ("the port is taken", "dsv4 launch: 127.0.0.1:8899 is not free: pid 5 (nginx) listens there"),
    (
        "an engine that would not go",
        "dsv4 launch: pid 9 (VLLM) took SIGKILL but is still there after",
    ),
    (
        "no complete runtime",
        "dsv4 launch: /opt/dsv4/current: no complete runtime there (no manifest.json); deploy",
    ),
    ("another model answers", "dsv4 ready: wrong model: it serves other, not DSV4-Flash; another"),
    ("it generates nothing", "dsv4 ready: timeout: no token after 1800 s, still loading (3 of 48)"),
    ("it generates nothing", "dsv4 ready: empty answer to 'The capital': no text and no reasoning"),
    ("the start took too long", "dsv4.service: start operation timed out. Terminating."),
    ("the start took too long", "dsv4.service: start-post operation timed out. Terminating."),
    (
        "the engine ended by itself",
        "dsv4 launch: the engine ended by itself with status 0, which counts as a failure",
    ),
    (
        "the unit cannot be read",
        "/etc/systemd/system/x.service:9: Failed to resolve unit specifiers",
    ),
    ("a value lost its quotes", "json.decoder.JSONDecodeError: Expecting property name enclosed"),
    (
        "an environment file with quotes",
        "x.service: Ignoring invalid environment assignment 'export A=1': /etc/dsv4/environment",
    ),
    ("systemd could not set it up", "x.service: Main process exited, code=exited, status=217/USER"),
    ("systemd could not set it up", "dsv4.service: Failed to set up credentials: No such file"),
    ("home directories are closed", "OSError: [Errno 30] Read-only file system: '/home/me/.cache'"),
    ("too many starts", "dsv4.service: Start request repeated too quickly."),
    ("memory cannot be locked", "RuntimeError: mlockall failed: Cannot allocate memory"),
    ("too many open files", "OSError: [Errno 24] Too many open files"),
    ("a command line that is too long", "OSError: [Errno 7] Argument list too long: 'python3'"),
    (
        "the key is not the engine's",
        "dsv4 probe: auth: /v1/models answers 401: the key is not the engine's",
    ),
    ("logging dropped lines", "Suppressed 2411 messages from dsv4.service"),
    # The machine
    (
        "the package manager is busy",
        "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 812",
    ),
    (
        "the package manager is busy",
        "dpkg: error: dpkg frontend lock was locked by another process with pid 812",
    ),
    (
        "an interrupted package upgrade",
        "E: dpkg was interrupted, you must manually run 'dpkg --configure -a'",
    ),
    ("the machine cannot fork", "sshd[1]: error: fork: Cannot allocate memory"),
    # The controller
    ("a changed host key", "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @"),
    ("a changed host key", "BadHostKeyException: Host key for server 'spark.local' does not match"),
    ("the name leads nowhere", "ssh: Could not resolve hostname spark.local: Name or service not"),
    ("sudo asks for a password", "sudo: a password is required"),
    ("the connection was lost", "[spark] connection lost (Socket is closed); trying again"),
    (
        "another deploy is at work",
        "dsv4 lock: another deploy is at work on this machine: me on laptop",
    ),
    ("the settings are wrong", "--> pyinfra error: the settings are wrong, nothing was changed:"),
    (
        "a temporary directory that is too small",
        "scp: /tmp/pyinfra-3f1c: write failed: No space left on device",
    ),
    # Consequences
    (
        "the engine's core died",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ),
    ("the engine's core died", f"{VLLM}EngineCore encountered a fatal error."),
    (
        "the engine's core died",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack"
        " trace (above) for the root cause.",
    ),
    ("the unit ended", "dsv4.service: Main process exited, code=exited, status=1/FAILURE"),
    # Context
    (
        "file limit not raised",
        "(APIServer pid=1) WARNING 12-01 01:49:36 [system_utils.py:299] Found ulimit of 20000 and"
        " failed to automatically increase with error x. This can cause fd limit errors like"
        " `OSError: [Errno 24] Too many open files`",
    ),
    (
        "optional extension missing",
        "WARNING 12-01 01:49:18 [indexer_topk.py:29] Failed to import the DeepSelect extension"
        " (vllm._deepselect_C): No module named 'vllm._deepselect_C'",
    ),
    (
        "torch does not list this GPU",
        "UserWarning: Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.",
    ),
    ("memory fields not reported", "nvidia-smi: [N/A], [N/A], [N/A], 0"),
    (
        "compilation cache",
        "WARNING 12-01 01:49:18 torch.compile cache miss, compiling from scratch",
    ),
    ("compilation cache", "flashinfer.jit: cache directory is cold, building kernels"),
    ("NCCL's own words", "spark:1470:1470 [0] NCCL INFO NET/IB : No device found."),
    ("NCCL's own words", "Warning: WARNING: destroy_process_group() was not called before program"),
    (
        "left for the end",
        "UserWarning: resource_tracker: There appear to be 2 leaked shared_memory objects to clean",
    ),
    ("prefetch left out", "WARNING [weight_utils.py:918] Auto-prefetch is disabled because x"),
    ("needrestart", "needrestart: Service restarts being deferred: systemctl restart dsv4.service"),
    ("a warning of Python's", "DeprecationWarning: invalid escape sequence"),
    ("a request was refused", '(APIServer pid=1) INFO: 127.0.0.1:5 - "GET /nothing HTTP/1.1" 404'),
)


ENGINE = "dsv4.service"
WATCHDOG = "dsv4-watchdog.service"
FETCH = "dsv4-fetch.service"
BUILD = "dsv4-build.service"
KERNEL = "kernel"

START = (
    (ENGINE, "Starting dsv4.service - vLLM, serving DSV4-Flash..."),
    (ENGINE, "dsv4 launch: port 8899 is free, runtime nightly-1, view abc"),
    (ENGINE, "dsv4 cache_drop: kept the page cache: enough is free; 112.0 GiB free"),
    (ENGINE, "dsv4 memory_gate: 112.0 GiB free, 108.6 needed, 0.0 s"),
    (ENGINE, "dsv4 ready: starting: 0 of 48 weight files, 0.0 GiB, 0 s"),
)
SERVES = (
    (ENGINE, "(APIServer pid=7) INFO:     Application startup complete."),
    (ENGINE, "dsv4 ready: ready after 690.1 s: DSV4-Flash says ' Paris'"),
    (ENGINE, "Started dsv4.service - vLLM, serving DSV4-Flash."),
)
FAILS = (
    (
        ENGINE,
        "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.",
    ),
    (ENGINE, "dsv4 ready: crash: the engine ended (pid 7) while loading after 60 s"),
    (ENGINE, "dsv4.service: Control process exited, code=exited, status=1/FAILURE"),
    (ENGINE, "dsv4 launch: ended: crash: the engine ended (pid 7) while loading after 60 s"),
    (ENGINE, "dsv4.service: Failed with result 'exit-code'."),
    (ENGINE, "Failed to start dsv4.service - vLLM, serving DSV4-Flash."),
)
RESTART = ((ENGINE, "dsv4.service: Scheduled restart job, restart counter is at 1."),)


def raised(*errors: str, process: str = "EngineCore pid=9") -> tuple[tuple[str, str], ...]:
    """Return a chain of exceptions as vLLM logs one, the first error first."""
    out = []
    for number, error in enumerate(errors):
        prefix = f"({process}) ERROR 12-01 01:50:11 [core.py:812] "
        if number:
            out += [prefix, f"{prefix}The above exception was the direct cause of the following"]
        out += [
            f"{prefix}Traceback (most recent call last):",
            f'{prefix}  File "/opt/dsv4/current/lib/x.py", line 3, in load',
            f"{prefix}    raise SomeError(text)",
            f"{prefix}{error}",
        ]
    return tuple((ENGINE, text) for text in out)


@dataclass(frozen=True)
class Story:
    """A journal and what is to be said of it.

    + wrong: the causes, in order
    + unknown: what the first line of an error that nobody described begins with
    + over: causes that are no more
    """

    name: str
    said: tuple[tuple[str, str], ...]
    wrong: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    over: tuple[str, ...] = ()

    def lines(self) -> list[Line]:
        """Return it as doctor reads it, a second a line."""
        return [Line(text, unit, float(at)) for at, (unit, text) in enumerate(self.said)]


NOISE = tuple((ENGINE, text) for name, text in TEXTS[-13:] for name in [name])

HEALTHY = (
    Story("nothing yet", ()),
    Story("a start that went well", (*START, *SERVES)),
    Story("a start that is under way", START),
    Story("a start with all the noise there is", (*START, *NOISE, *SERVES, *NOISE)),
    Story(
        "served, asked, stopped, started again",
        (
            *START,
            *SERVES,
            (
                ENGINE,
                '(APIServer pid=7) INFO: 127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 200 OK',
            ),
            (ENGINE, "Stopping dsv4.service - vLLM, serving DSV4-Flash..."),
            (ENGINE, "(APIServer pid=7) INFO:     Shutting down"),
            *(
                (ENGINE, text)
                for text in ("Traceback (most recent call last):", "KeyboardInterrupt")
            ),
            (ENGINE, "Stopped dsv4.service - vLLM, serving DSV4-Flash."),
            *START,
            *SERVES,
        ),
    ),
    Story(
        "one request that failed in a service that goes on",
        (*START, *SERVES, *raised("ValueError: temperature must be non-negative")),
    ),
    Story(
        "a request that was too long",
        (*START, *SERVES, (ENGINE, "ValueError: maximum context length is 65536 tokens, got 99")),
    ),
    Story(
        "a download and a build",
        (
            (FETCH, "Starting dsv4-fetch.service - Download the DSV4 pack..."),
            (FETCH, "dsv4 fetch: 52.0 GB (48.4 GiB) of 101.4 GB (94.5 GiB)"),
            (BUILD, "Starting dsv4-build.service - Build the DSV4 runtime..."),
            (BUILD, "dsv4 build: install the locked packages"),
            (BUILD, "Installed 147 packages in 32.54s"),
            (BUILD, " + exceptiongroup==1.3.0"),
            (BUILD, "Finished dsv4-build.service - Build the DSV4 runtime."),
            (FETCH, "dsv4 fetch: /x: complete, 54 files, all verified"),
            (FETCH, "Finished dsv4-fetch.service - Download the DSV4 pack."),
        ),
    ),
    Story(
        "the kernel's usual words",
        (
            (KERNEL, "Linux version 6.17.0-1008-nvidia (buildd@bos03)"),
            (KERNEL, "NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.95.05"),
            (KERNEL, "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode"),
        ),
    ),
    Story(
        "a settings dump with every word in it",
        (
            *START,
            (
                ENGINE,
                "(EngineCore pid=9) INFO 12-01 01:50:00 [core.py:123] Initializing a V1 LLM engine"
                " with config: trust_remote_code=False, quantization=exl3, error=None, fatal=False",
            ),
            *SERVES,
        ),
    ),
)

STORIES = (
    Story(
        "page cache is in the way",
        (
            *START,
            *raised(TEXTS[0][1].removeprefix(VLLM), "RuntimeError: worker failed to start"),
            *FAILS,
        ),
        wrong=("refused memory",),
    ),
    Story(
        "three starts with one cause, then no more",
        (
            *3 * (*START, *raised("torch.OutOfMemoryError: CUDA out of memory."), *FAILS, *RESTART),
            (ENGINE, "Starting dsv4.service - vLLM, serving DSV4-Flash..."),
            (
                ENGINE,
                "dsv4 launch: no further start: 3 automatic restarts did not help; last: crash",
            ),
            (ENGINE, "dsv4 launch: not started: 3 automatic restarts did not help; last: crash"),
            (ENGINE, "dsv4.service: Main process exited, code=exited, status=78/CONFIG"),
            (ENGINE, "dsv4.service: Failed with result 'exit-code'."),
        ),
        wrong=("out of memory",),
    ),
    Story(
        "the cause comes first, what follows is its doing",
        (
            *START,
            (ENGINE, "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda'"),
            *raised("ValueError: No valid attention backend found for cuda"),
            *FAILS,
        ),
        wrong=("ninja or nvcc not found", "no attention backend"),
    ),
    Story(
        "the watchdog struck",
        (
            *START,
            *SERVES,
            (
                WATCHDOG,
                "dsv4 watchdog: dsv4.service killed: 3.10 GiB available, the hard floor is 3.5",
            ),
            (ENGINE, "dsv4.service: Main process exited, code=killed, status=9/KILL"),
            (ENGINE, "dsv4 launch: ended: stopped by the watchdog: 3.10 GiB available"),
            (ENGINE, "dsv4.service: Failed with result 'signal'."),
        ),
        wrong=("killed by the watchdog",),
    ),
    Story(
        "the watchdog struck, and it serves again",
        (
            *START,
            *SERVES,
            (
                WATCHDOG,
                "dsv4 watchdog: dsv4.service killed: 3.10 GiB available, the hard floor is 3.5",
            ),
            (ENGINE, "dsv4.service: Main process exited, code=killed, status=9/KILL"),
            *RESTART,
            *START,
            *SERVES,
        ),
        over=("killed by the watchdog",),
    ),
    Story(
        "one fault was mended, the next one came",
        (
            *START,
            *raised("RuntimeError: Ninja is required to load C++ extensions"),
            *FAILS,
            *START,
            *raised("ValueError: No available memory for the cache blocks."),
            *FAILS,
        ),
        wrong=("no room for the KV cache",),
        over=("ninja or nvcc not found",),
    ),
    Story(
        "an error that nobody described, in a chain",
        (
            *START,
            *raised(
                "zmq.error.SomethingError: the moon is in the way", "RuntimeError: cannot load"
            ),
            *FAILS,
        ),
        unknown=("zmq.error.SomethingError: the moon is in the way",),
    ),
    Story(
        "two processes log between each other's lines",
        (
            *START,
            *(
                line
                for pair in zip(
                    raised("OverflowError: the first error"),
                    raised("RuntimeError: of another one", process="Worker pid=11"),
                    strict=True,
                )
                for line in pair
            ),
            *FAILS,
        ),
        unknown=("OverflowError: the first error",),
    ),
    Story(
        "systemd's limit, not a crash",
        (
            *START,
            (ENGINE, "dsv4 ready: loading: 30 of 48 weight files, 60.1 GiB, 1800 s"),
            (ENGINE, "dsv4.service: start-post operation timed out. Terminating."),
            (ENGINE, "dsv4.service: Failed with result 'timeout'."),
        ),
        wrong=("the start took too long",),
    ),
    Story(
        "a compiler's first error, far above the end",
        (
            (BUILD, "Starting dsv4-build.service - Build the DSV4 runtime..."),
            (BUILD, "dsv4 build: compile exllamav3's extension"),
            (BUILD, "[3/131] nvcc -c kernels.cu"),
            (BUILD, 'quant/kernels.cu(17): error: identifier "frobnicate" is undefined'),
            *((BUILD, f"note: in instantiation {n}") for n in range(50)),
            (BUILD, "ninja: build stopped: subcommand failed."),
            (BUILD, "dsv4-build.service: Main process exited, code=exited, status=1/FAILURE"),
            (BUILD, "dsv4-build.service: Failed with result 'exit-code'."),
        ),
        unknown=("quant/kernels.cu(17): error",),
    ),
    Story(
        "a download without the terms",
        (
            (FETCH, "Starting dsv4-fetch.service - Download the DSV4 pack..."),
            (FETCH, "dsv4 fetch: o/p: this repository is gated and no token was given; accept its"),
            (FETCH, "dsv4-fetch.service: Main process exited, code=exited, status=1/FAILURE"),
            (FETCH, "dsv4-fetch.service: Failed with result 'exit-code'."),
        ),
        wrong=("terms not accepted",),
    ),
    Story(
        "the driver was upgraded underneath",
        (
            (
                KERNEL,
                "NVRM: API mismatch: the client has the version 580.99, but this kernel module",
            ),
            *START,
            *raised("RuntimeError: No CUDA GPUs are available"),
            *FAILS,
        ),
        wrong=("driver and library differ", "the GPU cannot be reached"),
    ),
    Story(
        "only consequences are left in the journal",
        (*START, *FAILS[2:]),
        wrong=("the unit ended",),
    ),
)
