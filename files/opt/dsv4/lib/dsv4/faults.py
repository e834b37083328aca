"""Known faults as data: how each shows in a log, what causes it, what to do, who reported it.

One table for three readers: `doctor` on the machine, the hooks that say why a start failed, and the
README's troubleshooting. A line is judged alone and by the first row that fits, so a row stands
before the more general ones. Four kinds of rows:

    cause        explains why something does not work
    consequence  what a cause looks like further down; said only when no cause was found
    request      one request was answered with an error; the service is well
    context      looks like an error and proves nothing: healthy machines log it too
"""

import re
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["cause", "consequence", "request", "context"]
Part = Literal["memory", "engine", "pack", "download", "build", "service", "machine", "controller"]

PARTS: Final[dict[Part, str]] = {
    "memory": "Memory",
    "engine": "The engine",
    "pack": "The pack",
    "download": "The download",
    "build": "Building the runtime",
    "service": "The service and its guards",
    "machine": "The machine",
    "controller": "The controller and its connection",
}
"""What a fault is about, in the words the README groups them under."""


@dataclass(frozen=True)
class Fault:
    """One row; `says` are regular expressions, any of which is searched for in a single line."""

    name: str
    part: Part
    says: tuple[str, ...]
    cause: str
    remedy: str = ""
    source: str = ""
    kind: Kind = "cause"
    told: bool = False
    """Whether an ordinary line (level INFO) says it; otherwise such a line is never an error."""
    shown: str = ""
    """The tell-tale text as people search for it; without one, the README leaves the row out."""
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "pattern", re.compile("|".join(f"(?:{text})" for text in self.says))
        )


OURS: Final = "what this project's tools say"

CONTEXT: Final = (
    Fault(
        "file limit not raised",
        "engine",
        (r"Found ulimit of \d+ and failed to automatically increase",),
        "the engine wanted more open files than its unit gives; what follows in that line is an"
        " example, nobody met it",
        source="seen in a healthy start of vLLM 0.30.0",
        kind="context",
    ),
    Fault(
        "optional extension missing",
        "engine",
        (
            r"Failed to import (?:the \S+ extension|from vllm\.\S+)",
            r"Triton (?:is )?not (?:installed|available)",
            r"Import(?:ing)? .*failed.*(?:optional|fallback|falling back)",
        ),
        "a part that this route does not use is not there",
        source="seen in a healthy start of vLLM 0.30.0",
        kind="context",
    ),
    Fault(
        "torch does not list this GPU",
        "engine",
        (
            r"cuda capability 12\.1",
            r"[Mm]inimum and [Mm]aximum cuda capability supported",
        ),
        "torch names the GPUs it has code for; sm_121 runs code made for sm_120, and what needs"
        " its own is compiled for it",
        source="reported from healthy GB10 machines",
        kind="context",
    ),
    Fault(
        "memory fields not reported",
        "machine",
        (
            r"\[?N/A\]?.*\bMiB\b",
            r"\[N/A\]",
            r"\[Not Supported\]",
        ),
        "nvidia-smi reports no memory on a GB10: it is the host's own, see /proc/meminfo",
        source="ollama, unsloth and nvtop report it from GB10 machines",
        kind="context",
    ),
    Fault(
        "compilation cache",
        "engine",
        (
            r"^(?!.*(?:Error|Exception|denied|fatal|No space)).*\b(?i:jit|torch\.compile|inductor"
            r"|aot|triton|flashinfer)\b.*\bcache\b",
        ),
        "kernels are compiled at their first use and kept; a first start says so more often",
        source="vLLM's own words for what it does",
        kind="context",
    ),
    Fault(
        "NCCL's own words",
        "engine",
        (
            r"\bNCCL (?:INFO|WARN)\b",
            r"ProcessGroupNCCL.*(?:warn|WARN)",
            r"destroy_process_group\(\) was not called",
        ),
        "one GPU uses none of it",
        source="torch's own words at the end of any run",
        kind="context",
    ),
    Fault(
        "left for the end",
        "engine",
        (
            r"resource_tracker: There appear to be \d+ leaked",
            r"leaked (?:semaphore|shared_memory) objects",
            r"resource_tracker: There appear to be %d",
        ),
        "Python tidies up after a process that ended; it says nothing about why",
        source="seen in the lab after deliberate stops",
        kind="context",
    ),
    Fault(
        "prefetch left out",
        "engine",
        (
            r"(?:Auto-)?[Pp]refetch(?:ing)? is (?:disabled|skipped|ignored)",
            r"exceeds? 90 ?% of (?:the )?available RAM",
        ),
        "vLLM reads a pack ahead only when it fits into free memory; this one does not",
        source="seen in a healthy start of vLLM 0.30.0",
        kind="context",
    ),
    Fault(
        "needrestart",
        "machine",
        (
            r"needrestart",
            r"Services to be restarted",
            r"Service restarts being deferred",
        ),
        "the package manager lists services on old libraries; ours is exempt from its restarts",
        source="liske/needrestart #159",
        kind="context",
    ),
    Fault(
        "a warning of Python's",
        "engine",
        (r"\b(?:Deprecation|Future|PendingDeprecation|Resource|Syntax)Warning\b",),
        "a note to the programmers of a package",
        source="Python's own warnings",
        kind="context",
    ),
    Fault(
        "a request was refused",
        "engine",
        (r"\"(?:GET|POST|HEAD|PUT|DELETE|OPTIONS) \S+ HTTP/[\d.]+\" 4\d\d",),
        "somebody asked for what is not there, without the key, or wrongly; the server is well",
        source="the access log of vLLM's server",
        kind="context",
    ),
)

MEMORY: Final = (
    Fault(
        "driver's memory query failed",
        "memory",
        (
            r"mem_get_info.*(?:CUDA|cuda)",
            r"cudaMemGetInfo",
            r"(?:CUDA|cuda).*(?:mem_get_info|MemGetInfo)",
        ),
        "a CUDA call failed before any weight was loaded; the utilisation has nothing to do "
        "with it",
        "look at `nvidia-smi` and the kernel's messages; reboot when the driver does not answer",
        "NVIDIA/xr-ai PR #440",
        shown="cudaMemGetInfo … failed",
    ),
    Fault(
        "refused memory",
        "memory",
        (r"Free memory on device.*is less than desired GPU memory utilization",),
        "the engine found less free memory than its share: page cache counts as used for CUDA",
        "the memory gate's line above says who holds it; restart, or lower "
        "serve_gpu_memory_utilization to what that line names",
        "vllm-project/vllm #35920",
        shown="Free memory on device … is less than desired GPU memory utilization",
    ),
    Fault(
        "memory moved while it profiled",
        "memory",
        (r"Error in memory profiling",),
        "something released memory while the engine measured it, which its assertion takes for "
        "an error",
        "it passes: a second try usually works; stop whatever drops caches or ends beside the "
        "start",
        "vllm-project/vllm #56830",
        shown="Error in memory profiling … current free memory",
    ),
    Fault(
        "no room for the KV cache",
        "memory",
        (
            r"No available memory for the cache blocks",
            r"larger than the maximum number of tokens that can be stored in KV cache",
            r"KV\s*cache is needed, which is larger than",
        ),
        "weights, graphs and one step of prompts leave too little for the context",
        "lower serve_max_model_len or serve_max_num_batched_tokens (2048 at 256k context); "
        "raise the utilisation only as far as the settings allow",
        "MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark #16",
        shown="No available memory for the cache blocks",
    ),
    Fault(
        "out of memory",
        "memory",
        (
            r"(?:torch\.)?(?:cuda\.)?OutOfMemoryError",
            r"CUDA out of memory",
            r"CUDA error: out of memory",
            r"cudaErrorMemoryAllocation",
        ),
        "the GPU's allocator was refused; GPU and host share one memory",
        "lower serve_gpu_memory_utilization, or the context; stop other users of the GPU",
        "eugr/spark-vllm-docker #388",
        shown="CUDA out of memory",
    ),
    Fault(
        "memory pinned by the driver",
        "memory",
        (r"pinned by the driver, reboot needed",),
        "memory of an engine that ended never came back, and belongs to no process",
        "reboot",
        "mudler/LocalAI #10722",
        shown="pinned by the driver, reboot needed",
    ),
    Fault(
        "kernel keeps memory for handover",
        "memory",
        (r"CmaFree is above CmaTotal",),
        "a kernel reserves about 9.3 GiB for kexec handover (7.0.0-1019-nvidia does)",
        "add `kho=off` to the kernel's command line and reboot",
        "reported for DGX Spark rigs, September 2026",
        shown="CmaFree above CmaTotal",
    ),
    Fault(
        "the memory gate refused",
        "memory",
        (r"dsv4 memory_gate: wanted ",),
        "too little memory was free within the gate's bound; the line names who holds it",
        "stop what it names, or set the utilisation it gives",
        OURS,
        shown="dsv4 memory_gate: wanted",
    ),
    Fault(
        "killed by the watchdog",
        "memory",
        (r"dsv4 watchdog: \S+ (?:killed|asked to stop): ",),
        "available memory fell to the floor below which this machine freezes",
        "lower the utilisation, the context or serve_max_num_seqs; `dsv4 status` names who used"
        " memory then",
        OURS,
        shown="dsv4 watchdog: dsv4.service killed",
    ),
    Fault(
        "killed by the kernel",
        "memory",
        (
            r"Out of memory: Killed process",
            r"oom-kill:",
            r"Memory cgroup out of memory",
            r"Failed with result 'oom-kill'",
        ),
        "the kernel's OOM killer ended a process",
        "see who used memory in the lines around it; stop it or lower the utilisation",
        "the kernel's own words",
        shown="Out of memory: Killed process",
    ),
    Fault(
        "killed by systemd-oomd",
        "memory",
        (
            r"systemd-oomd.*Killed",
            r"Killed \S+ due to memory (?:used|pressure)",
        ),
        "systemd-oomd ended a whole group of processes, such as an SSH session with a build in it",
        "run long work as a unit, as the deploy does; systemctl disable --now systemd-oomd "
        "otherwise",
        "systemd/systemd #25853",
        shown="systemd-oomd killed some process(es)",
    ),
    Fault(
        "page cache does not go",
        "memory",
        (r"dsv4 cache_drop: .*still mapped by ",),
        "pages that a process has mapped are not dropped",
        "end the process it names, then restart",
        "safetensors/safetensors #758",
        shown="still mapped by pid",
    ),
    Fault(
        "a compiler was killed",
        "memory",
        (
            r"Killed signal terminated program",
            r"(?:nvcc|ninja|cc1plus|cicc|ptxas).*(?:Killed|signal 9)",
        ),
        "compilers take 1.6 to 5.1 GiB each, and too many ran at once",
        "let the deploy compile, which bounds them by memory; else set MAX_JOBS",
        "flashinfer-ai/flashinfer #3634",
        shown="Killed signal terminated program cc1plus",
    ),
)

ENGINE: Final = (
    Fault(
        "ptxas is too old",
        "engine",
        (r"Value 'sm_\w+' is not defined for option 'gpu-name'",),
        "Triton's bundled assembler does not know this GPU",
        "TRITON_PTXAS_PATH must name the toolkit's ptxas: deploy again, and see cuda_home",
        "triton-lang/triton #8539",
        shown="ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'",
    ),
    Fault(
        "driver and library differ",
        "machine",
        (
            r"[Dd]river/library version mismatch",
            r"API mismatch: the (?:client|NVIDIA)",
        ),
        "the driver was upgraded underneath the running kernel module",
        "reboot; reinstalling changes nothing",
        "canonical/ubuntu-server-documentation PR #369",
        shown="Failed to initialize NVML: Driver/library version mismatch",
    ),
    Fault(
        "the GPU cannot be reached",
        "machine",
        (
            r"CUDA error: initialization error",
            r"Failed to initialize NVML",
            r"Found no NVIDIA driver",
            r"No CUDA GPUs are available",
            r"couldn't communicate with the NVIDIA driver",
        ),
        "the driver does not answer, or its device files are closed to the service",
        "check `nvidia-smi`; after a driver upgrade reboot; then `systemctl show -p DeviceAllow"
        " dsv4`",
        "NixOS/nixpkgs #331069",
        shown="Found no NVIDIA driver; No CUDA GPUs are available",
    ),
    Fault(
        "the GPU reported an error",
        "machine",
        (
            r"NVRM: Xid",
            r"GPU has fallen off the bus",
        ),
        "the driver logged a fault of the GPU or of what runs on it",
        "look the Xid number up at the driver's maker; reboot, and unplug the adapter for a "
        "minute when clocks stay below 1 GHz",
        "the kernel's own words",
        shown="NVRM: Xid",
    ),
    Fault(
        "no code for this GPU",
        "engine",
        (r"no kernel image is available for execution on the device",),
        "something was compiled for another GPU; a build that takes 12.1 for 12.0 makes such code",
        "let the deploy build it: the architecture is 12.1a there",
        "vllm-project/vllm #36835",
        shown="no kernel image is available for execution on the device",
    ),
    Fault(
        "no attention backend",
        "engine",
        (r"No valid attention backend found",),
        "FlashInfer is switched off when no nvcc is found, and nothing else fits this model",
        "cuda_home must name a toolkit; `dsv4 doctor` checks the service's own PATH",
        "vllm-project/vllm #32732",
        shown="No valid attention backend found",
    ),
    Fault(
        "ninja or nvcc not found",
        "engine",
        (
            r"No such file or directory: '(?:\S*/)?(?:ninja|nvcc|ptxas)'",
            r"Could not find nvcc",
            r"Ninja is required to load C\+\+ extensions",
            r"(?:nvcc|ninja)(?:: command)?: not found",
            r"CUDA_HOME environment variable is not set",
        ),
        "the service's PATH lacks the runtime's or the toolkit's programs; a shell has another "
        "PATH",
        "deploy again: the launcher puts both first; see cuda_home",
        "flashinfer-ai/flashinfer PR #3386",
        shown="No such file or directory: 'ninja'; Could not find nvcc",
    ),
    Fault(
        "torch without CUDA",
        "engine",
        (
            r"Torch not compiled with CUDA enabled",
            r"after .* torch is for .*, wanted ",
        ),
        "a package put a CPU torch in place of the CUDA one",
        "deploy again: a runtime is built anew when its packages differ from the lock",
        "pytorch/pytorch #168065",
        shown="Torch not compiled with CUDA enabled",
    ),
    Fault(
        "two CUDA toolkits are mixed",
        "engine",
        (
            r"compiler and CUDA toolkit headers are incompatible",
            r"detected CUDA version \(\S+\) mismatches the version",
            r"is of release \S+, wanted from",
        ),
        "nvcc and headers, or nvcc and torch, are of different CUDA releases",
        "point cuda_home at one versioned directory, such as /usr/local/cuda-13.0",
        "vllm-project/vllm #44305",
        shown="CUDA compiler and CUDA toolkit headers are incompatible",
    ),
    Fault(
        "a weight has no place in the model",
        "engine",
        (
            r"There is no module or parameter named",
            r"KeyError: '?(?:\S*\.)?(?:gate\.bias(?:_vl)?|e_score_correction_bias)\S*",
        ),
        "this vLLM has no vision class, and its loader refuses the pack's vision weights and "
        "routing biases",
        "use a route whose patches skip them (stock), or one with vision (nightly, stable, latest)",
        "read in vLLM 0.28.0 and 0.29.0",
        shown="There is no module or parameter named 'vision…'; KeyError: '…gate.bias_vl'",
    ),
    Fault(
        "draft weights have no place",
        "engine",
        (r"KeyError: '?(?:\S*\.)?w13_weight_scale",),
        "the plugin gave the draft's experts another format than the loader expects",
        "use the pinned plugin (0.4.2 or later), or serve_speculative_tokens=0",
        "vllm-exl3's changelog, 0.4",
        shown="KeyError: w13_weight_scale",
    ),
    Fault(
        "output projection wants FP8 scales",
        "engine",
        (r"AttributeError.*\bweight_scale(?:_inv)?\b",),
        "the attention's output projection reads FP8 scales that BF16 weights do not have",
        "the o_proj_bf16 patch is missing: deploy again with an unmodified route",
        "read in vLLM 0.28.0 and 0.29.0",
        shown="AttributeError: … has no attribute 'weight_scale_inv'",
    ),
    Fault(
        "patched for another FlashInfer",
        "engine",
        (r"TypeError.*lse_scale",),
        "a patch for FlashInfer 0.6 runs on 0.7, where a call takes one argument more",
        "this release needs no such patch: use route latest unpatched",
        "read in FlashInfer 0.7.2",
        shown="TypeError: … missing 1 required … argument: 'lse_scale'",
    ),
    Fault(
        "window too wide for the kernel",
        "engine",
        (
            r"flashinfer(?:-ai/flashinfer)?#4380",
            r"(?:unsupported|no).*(?:topk|specialization).*(?:128|192|256|512).*(?:sm120|SM120|spa"
            r"rse)",
            r"(?:sm120|SM120|sparse).*(?:unsupported|only).*topk",
        ),
        "FlashInfer has no kernel of this width: images need 512 columns, the draft 192",
        "the wide_swa patch or a newer FlashInfer is missing: deploy again with an unmodified "
        "route",
        "flashinfer-ai/flashinfer #4380",
        shown="flashinfer#4380",
    ),
    Fault(
        "the draft proposes too much",
        "engine",
        (
            r"num_speculative_tokens:? ?\d+.*must be divisible",
            r"must be divisible by.*n_predict",
        ),
        "more proposed tokens than draft layers must be a multiple of them",
        "set serve_speculative_tokens to 3, or a multiple of it",
        "read in vLLM 0.30.0",
        shown="num_speculative_tokens … must be divisible by n_predict",
    ),
    Fault(
        "an empty text_config",
        "pack",
        (r"text_config.*(?:does not have|has no).*num_attention_heads",),
        "an empty nested text_config in config.json is taken for the model's",
        "serve the view the deploy makes, whose config.json is put right",
        "the recipe's notes",
        shown="text_config … does not have num_attention_heads",
    ),
    Fault(
        "FP8 claims the model",
        "pack",
        ("quantization=['\\\"]?deepseek_v4_fp8",),
        "the pack's config.json still names FP8, so the experts are loaded as such: 117 GiB",
        "serve the view the deploy makes, whose config.json says exl3",
        "the recipe's notes",
        told=True,
        shown="quantization=deepseek_v4_fp8",
    ),
    Fault(
        "unknown quantisation",
        "engine",
        (
            r"(?:Unknown|Invalid|unknown|invalid) quantization(?: method)?.*exl3",
            r"quantization.*exl3.*(?:not in|is not|does not)",
        ),
        "the EXL3 plugin is not in the runtime or did not import (0.3.1 does not)",
        "`dsv4 verify` says which; deploy again",
        "vllm-exl3's README",
        shown="Unknown quantization method: exl3",
    ),
    Fault(
        "the extension does not import",
        "engine",
        (
            r"libc10\.so: cannot open shared object file",
            r"No module named 'exllamav3_ext'",
            r"cannot import name 'LinearEXL3'",
        ),
        "exllamav3's extension was imported before torch, or is not in the runtime",
        "deploy again; by hand, `import torch` goes first",
        "compiled and tried by this project",
        shown="libc10.so: cannot open shared object file",
    ),
    Fault(
        "extension and plugin do not fit",
        "engine",
        (
            r"exl3_moe\(\): incompatible function arguments",
            r"exl3_moe.*(?:takes|expected) \d+",
        ),
        "exllamav3 1.5.0 changed the call the plugin makes",
        "use the pinned 1.4.5: deploy again, and see exllamav3_wheel",
        "read in exllamav3 1.5.0",
        shown="exl3_moe(): incompatible function arguments",
    ),
    Fault(
        "renamed registries",
        "engine",
        (r"(?:TOOL_PARSER_REGISTRY|REASONING_PARSER_REGISTRY)",),
        "a script imports names that no vLLM of these releases has",
        "use `dsv4 verify`, which asks the parsers' managers",
        "read in vLLM 0.28.0 to 0.33.0",
        shown="cannot import name 'TOOL_PARSER_REGISTRY'",
    ),
    Fault(
        "a step took too long",
        "engine",
        (
            r"RPC call to \S+ timed out",
            r"execute_model.*[Tt]imed? ?out",
        ),
        "a kernel was compiled in the middle of a request and took longer than the engine waits",
        "ask again: what was compiled is kept; the limit is VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "OPERATIONS of other GB10 recipes",
        shown="RPC call to execute_model timed out",
    ),
    Fault(
        "the engine's own start limit",
        "engine",
        (
            r"Timed out waiting for (?:new )?engine core",
            r"Did not receive response from front-end",
        ),
        "vLLM's own limit for a start passed before systemd's",
        "raise service_start_timeout_s: the deploy raises both together",
        "vllm-project/vllm PR #44751",
        shown="Timed out waiting for engine core processes to start",
    ),
    Fault(
        "Python's headers are missing",
        "engine",
        (r"Python\.h: No such file or directory",),
        "the first Triton kernel is compiled against Python's headers",
        "apt install python3.12-dev (the deploy does), then restart",
        "vllm-project/vllm #27890",
        shown="fatal error: Python.h: No such file or directory",
    ),
    Fault(
        "no compiler",
        "engine",
        (
            r"InvalidCxxCompiler",
            r"Failed to find C(?:\+\+)? compiler",
            r"[Nn]o working C\+\+ compiler",
        ),
        "kernels are compiled at their first use, and there is no C++ compiler",
        "apt install g++; where none shall be, TORCHDYNAMO_DISABLE=1",
        "tried in the lab",
        shown="InvalidCxxCompiler: No working C++ compiler found",
    ),
    Fault(
        "libnuma is missing",
        "engine",
        (r"libnuma\.so\S*: cannot open shared object file",),
        "vLLM's CPU build needs libnuma1",
        "apt install libnuma1 (the deploy does)",
        "tried in the lab",
        shown="libnuma.so.1: cannot open shared object file",
    ),
    Fault(
        "an illegal instruction",
        "engine",
        (
            r"SIGILL",
            r"status=4/ILL",
            r"Illegal instruction",
        ),
        "code for another processor ran: bfloat16 on one with AMX does this in the CPU build",
        "set serve_dtype=float32 on the CPU route",
        "tried in the lab",
        shown="status=4/ILL",
    ),
    Fault(
        "not a multimodal model",
        "engine",
        (r"is not a multimodal model",),
        "an image was sent to a text-only route",
        "use a route with vision: nightly, stable or latest",
        "studio-dots-ai/dots.ocr #61",
        kind="request",
        shown="is not a multimodal model",
    ),
    Fault(
        "a prompt was too long",
        "engine",
        (
            r"maximum (?:context|model) length.*(?:tokens|requested)",
            r"longer than the maximum model length",
        ),
        "prompt and answer together exceed the context",
        "send less, lower max_tokens, or raise serve_max_model_len",
        "vLLM's answer to such a request",
        kind="request",
        shown="This model's maximum context length is … tokens",
    ),
)

PACK: Final = (
    Fault(
        "weight files cannot be served",
        "pack",
        (r"dsv4 launch: \S+: \d+ of \d+ weight files cannot be served:",),
        "files that the index names are missing, cut short, or closed to the engine's user",
        "deploy again; a user's own pack_dir must be readable for the account dsv4",
        "vllm-project/vllm #34859",
        shown="weight files cannot be served",
    ),
    Fault(
        "no safetensors file",
        "pack",
        (
            r"(?:header too (?:large|small)|HeaderToo(?:Large|Small)|invalid JSON in"
            r" header|InvalidHeader(?!Name)|invalid header(?: length|.deserialization)?)",
        ),
        "a shard is a pointer file, an error page or empty, not weights",
        "deploy again: what is not the hub's own bytes is fetched anew",
        "huggingface/transformers #27923",
        shown="Error while deserializing header: header too large",
    ),
    Fault(
        "a shard was cut short",
        "pack",
        (
            r"(?:incomplete metadata, file not fully covered|MetadataIncompleteBuffer|invalid"
            r" shape, data type, or offset|InvalidOffset|TensorInvalidInfo)",
        ),
        "a shard has fewer or more bytes than its header says",
        "deploy again: only the bad file is fetched anew",
        "datalab-to/marker #970",
        shown="incomplete metadata, file not fully covered",
    ),
    Fault(
        "a shard is missing",
        "pack",
        (
            r"(?:No such file or directory|FileNotFoundError|is missing, which).*\.safetensors",
            r"\.safetensors.*(?:No such file or directory|is missing, which)",
        ),
        "the index names a file that is not there, or that the engine's user may not read",
        "deploy again; a user's own pack_dir must be readable for the account dsv4",
        "sgl-project/sglang PR #32279",
        shown="No such file or directory: …safetensors",
    ),
    Fault(
        "configuration and shards disagree",
        "pack",
        (
            r"and shards disagree on bits",
            r"topk_method must be",
            r"has no EXL3 facts",
            r"head_bits.*(?:invalid|unsupported|must be)",
            r"quantization_config holds",
        ),
        "the pack's config.json says something else than its tensors",
        "verify the pack (`dsv4 pack_verify --full`); report it to its author if its bytes are "
        "right",
        "weicj/vLLM-2080Ti-Definitive PR #155",
        shown="config.json and shards disagree on bits",
    ),
    Fault(
        "unknown trellis",
        "pack",
        (
            r"(?:mcg|mul1).*marker.*(?:mismatch|expected|unknown)",
            r"trellis.*(?:mixed|unknown|mismatch|shape)|(?:mixed|unknown).*trellis",
        ),
        "the plugin met an EXL3 format it does not read",
        "use a pack of 2 to 6 bits with codebook mcg or mul1, and the pinned plugin",
        "read in vllm-exl3",
        shown="trellis shape mismatch",
    ),
    Fault(
        "code in the pack",
        "pack",
        (
            r"holds program code",
            r"trust_remote_code.*(?:required|True|execute)",
        ),
        "the pack brings Python files, which this project does not run",
        "use a pack without",
        OURS,
        shown="holds program code",
    ),
)

DOWNLOAD: Final = (
    Fault(
        "terms not accepted",
        "download",
        (
            r"has not accepted the terms",
            r"this repository is gated",
            r"GatedRepo(?:Error)?",
            r"[Cc]annot access gated repo",
            r"Access to model \S+ is restricted",
        ),
        "the pack is gated: it needs accepted terms and a token",
        "accept the terms on the hub, then deploy with HF_TOKEN",
        "the hub's answer",
        shown="Cannot access gated repo",
    ),
    Fault(
        "the token is not accepted",
        "download",
        (
            r"does not accept the token",
            r"token may not read it",
            r"Invalid (?:user )?token",
            r"Illegal header value",
            r"401 Client Error",
            r"give the token alone",
        ),
        "the token is mistyped, expired, without rights, or holds a line end or a quote",
        "make a read token anew and give it as HF_TOKEN",
        "ai-dynamo/modelexpress #277",
        shown="401 Client Error; Illegal header value b'Bearer '",
    ),
    Fault(
        "the hub limits requests",
        "download",
        (
            r"\b429\b.*(?:[Tt]oo [Mm]any|rate)",
            r"rate limit",
        ),
        "too many requests, more often without a token",
        "wait: the download goes on by itself; give it a token; fetch_workers lower",
        "huggingface/huggingface_hub #3342",
        shown="429 Too Many Requests",
    ),
    Fault(
        "the transfer stalls",
        "download",
        (r"(?:\bstalled\b|no byte|without a byte|nothing arriv(?:es|ed))",),
        "the line or xet stopped giving bytes",
        "it is tried again by itself; fetch_transport=http goes without xet",
        "huggingface/xet-core #850",
        shown="the transfer stalled",
    ),
    Fault(
        "bytes are not the hub's",
        "download",
        (
            r"not what the hub has",
            r"expected sha256 .* got ",
            r"[Hh]ash mismatch",
            r"changes the files",
            r"Consistency check failed",
        ),
        "what arrived has another hash than what was published",
        "it is fetched anew; when it stays, something on the way changes files, or the pin is old",
        "huggingface/huggingface_hub #3643",
        shown="Consistency check failed; Hash mismatch",
    ),
    Fault(
        "the disk is full",
        "machine",
        (
            r"No space left on device",
            r"\[Errno 28\]",
            r"Not enough free disk space",
            r"the disk is full",
            r"os error 28\b",
            r"GiB\) to spare, .*is free there",
        ),
        "a file system has no room left",
        "`df -h /opt /var/lib /tmp`; make room there, then deploy again",
        "huggingface/huggingface_hub #2742",
        shown="[Errno 28] No space left on device",
    ),
    Fault(
        "the clock is off",
        "machine",
        (
            r"(?:is|are) not (?:yet valid|valid yet)",
            r"certificate (?:has expired|is not yet valid)",
        ),
        "a clock far off makes package sources and TLS refuse what is fine",
        "timedatectl set-ntp true, wait, deploy again",
        "fwupd PR #2742",
        shown="Release file … is not valid yet; certificate is not yet valid",
    ),
    Fault(
        "the hub cannot be reached",
        "download",
        (
            r": cannot be reached: ",
            r"(?:Temporary failure in name resolution|Name or service not known)",
            r"Max retries exceeded with url",
            r"the proxy on the way wants",
        ),
        "no line to the hub, no name for it, or a proxy in between",
        "see hub_endpoint, hub_proxy and hub_ca_file; the download goes on by itself when it "
        "comes back",
        "the hub client's own words",
        shown="Temporary failure in name resolution",
    ),
    Fault(
        "a cache of somebody else's",
        "download",
        (
            r"PermissionError.*(?:cache|packs|huggingface)",
            r"Permission denied: '[^']*(?:cache|packs|huggingface)[^']*'",
        ),
        "an earlier run as root left files that the account of this run may not write",
        "deploy again: owners are put right",
        "MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks PR #41",
        shown="Permission denied: …/.cache/huggingface",
    ),
    Fault(
        "hf is not found",
        "download",
        (
            r"\bhf(?:-cli)?: (?:command )?not found",
            r"huggingface-cli: (?:command )?not found",
        ),
        "the hub's command is outside PATH; nothing here needs it",
        "let the deploy fetch, or name your download with pack_dir",
        "MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks #22",
        shown="hf: command not found",
    ),
)

BUILD: Final = (
    Fault(
        "x86 code on aarch64",
        "build",
        (
            r"immintrin\.h: No such file",
            r"__builtin_(?:ia32_pause|cpu_supports)",
        ),
        "exllamav3 before 1.5.3 has x86 code without a guard, and our patch was not applied",
        "let the deploy build it from 1.4.5, whose sources it patches",
        "turboderp-org/exllamav3 PR #393",
        shown="fatal error: immintrin.h: No such file or directory",
    ),
    Fault(
        "a patch does not fit",
        "build",
        (
            r"\bdrifted\b",
            r"expected one x86 pause block",
            r"do(?:es)? not fit together",
        ),
        "the source is not the text the patch was made for; nothing was changed",
        "use an unmodified route; with a newer engine, see whether it needs the patch at all",
        "eugr/spark-vllm-docker #344",
        shown="drifted; expected one x86 pause block",
    ),
    Fault(
        "the plugin is on no index",
        "build",
        (
            r"No matching distribution found for vllm[-_]exl3",
            r"vllm-exl3.*was not found in the package registry",
        ),
        "vllm-exl3 is published as sources and release files, not in the package registry",
        "let the deploy build the pinned commit, or name a wheel with plugin_wheel",
        "tried against the registry",
        shown="No matching distribution found for vllm-exl3",
    ),
    Fault(
        "requirements that cannot be met",
        "build",
        (
            r"No solution found when resolving",
            r"ResolutionImpossible",
            r"No matching distribution found",
        ),
        "versions exclude each other: vllm 0.28.0 pins flashinfer-python 0.6.16.post3",
        "install from the locks, as the deploy does",
        "read in the wheels' metadata",
        shown="ResolutionImpossible",
    ),
    Fault(
        "files damaged after the install",
        "build",
        (
            r"files are damaged after the install",
            r"differs from its RECORD",
            r"was changed after it was patched",
        ),
        "bytes in a runtime are not what its packages say: an edit, a disk, or a poisoned cache",
        "deploy again: the cached package is purged and the runtime built anew",
        "reproduced with uv's hard links",
        shown="differs from its RECORD",
    ),
    Fault(
        "compiling beside the model",
        "build",
        (r"compiling needs .* GiB beside the served model",),
        "a compiler and the served model together would reach the watchdog's floor",
        "set build_stops_service=true, or name exllamav3_wheel",
        OURS,
        shown="compiling needs … beside the served model",
    ),
    Fault(
        "a venv without pip",
        "build",
        (
            r"ensurepip is not available",
            r"No module named (?:ensurepip|pip)\b",
            r"\bpip3?: (?:command )?not found",
        ),
        "python3-venv is not installed, or a half-made environment is in the way",
        "apt install python3-venv (the deploy does), then deploy again",
        "pypa/packaging.python.org #399",
        shown="ensurepip is not available",
    ),
    Fault(
        "checkout of another owner",
        "build",
        (
            r"dubious ownership",
            r"--local can only be used inside a git repository",
        ),
        "git refuses a repository that belongs to another user",
        "nothing here uses git on the machine; for your own checkout run git as its owner",
        "pyinfra-dev/pyinfra #1930",
        shown="fatal: detected dubious ownership in repository",
    ),
)

SERVICE: Final = (
    Fault(
        "restarts given up",
        "service",
        (r"dsv4 launch: no further start: ",),
        "automatic restarts did not help; the reason is in the starts before",
        "mend the first cause below, then `systemctl start dsv4`",
        OURS,
        kind="consequence",
        shown="dsv4 launch: no further start",
    ),
    Fault(
        "the watchdog does not run",
        "service",
        (
            r"dsv4 launch: \S+ does not run, and nothing else keeps",
            r"because \S+-watchdog.service could not be kept running",
        ),
        "without its watchdog the engine is not started, or is stopped",
        "journalctl -u dsv4-watchdog; deploy again",
        OURS,
        shown="does not run, and nothing else keeps this machine from freezing",
    ),
    Fault(
        "the port is taken",
        "service",
        (
            r"[Aa]ddress already in use",
            r"dsv4 launch: \S+:\d+ is not free: ",
        ),
        "another process listens on the service's port",
        "stop the one it names, or set another serve_port",
        "vllm-project/vllm #9737",
        shown="[Errno 98] Address already in use",
    ),
    Fault(
        "an engine that would not go",
        "service",
        (r"took SIGKILL but is still there",),
        "a process hangs in the kernel or the driver and keeps its memory",
        "wait some minutes, or reboot",
        "vllm-project/vllm #55510",
        shown="took SIGKILL but is still there",
    ),
    Fault(
        "no complete runtime",
        "service",
        (
            r"dsv4 launch: .*no complete runtime there",
            r"cannot be run; deploy again to build a runtime",
        ),
        "the runtime in service was never finished, or was taken away",
        "deploy again, or deploy/rollback.py",
        OURS,
        shown="no complete runtime there",
    ),
    Fault(
        "another model answers",
        "service",
        (r"wrong model: it serves ",),
        "something else listens on the port, or another pack is served",
        "see who listens: ss -ltnp",
        OURS,
        shown="wrong model: it serves",
    ),
    Fault(
        "it generates nothing",
        "service",
        (
            r"dsv4 ready: (?:empty answer|timeout: no token)",
            r"dsv4 probe: empty:",
        ),
        "the server answers and no token comes: /health says 200 all the same",
        "see the engine's lines before it; raise service_start_timeout_s if the load was still "
        "moving",
        "vllm-project/vllm #36960",
        shown="timeout: no token",
    ),
    Fault(
        "the start took too long",
        "service",
        (
            r"(?:start|start-pre|start-post)\S* operation timed out\. Terminating",
            r"Failed with result 'timeout'",
            r"not ready within systemd's own limit",
        ),
        "systemd's limit for a start passed; it is no crash",
        "raise service_start_timeout_s: a cold load takes about 11 minutes by the recipe's figures",
        "RIDE-Lab/SAGE PR #1346",
        shown="start operation timed out. Terminating.",
    ),
    Fault(
        "the engine ended by itself",
        "service",
        (r"dsv4 launch: (?:ended: )?the engine ended by itself with status 0",),
        "a worker died, after which vLLM's server ends with status 0",
        "the worker's error is further up",
        "vllm-project/vllm #21915",
        kind="consequence",
        shown="the engine ended by itself with status 0",
    ),
    Fault(
        "the unit cannot be read",
        "service",
        (
            r"Failed to resolve unit specifiers",
            r"Unknown (?:key name|lvalue) .*dsv4\S*",
            r"dsv4\S*: .*(?:bad-setting|Invalid argument)",
        ),
        "a unit file holds what systemd does not understand, such as a lone percent sign",
        "change settings and not the unit; deploy again",
        "systemd/systemd #19014",
        shown="Failed to resolve unit specifiers",
    ),
    Fault(
        "a value lost its quotes",
        "service",
        (
            r"JSONDecodeError",
            r"invalid JSON(?: string)?",
            r"Value \S+ cannot be converted to.*loads",
        ),
        "JSON went through a unit file or a shell, which ate its quotes",
        "JSON belongs into serve.yaml, where the deploy puts it",
        "MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark #5",
        shown="json.decoder.JSONDecodeError",
    ),
    Fault(
        "an environment file with quotes",
        "service",
        (r"Ignoring invalid environment assignment",),
        "an environment file of systemd's is no shell script",
        "plain NAME=value lines only; deploy again",
        "systemd/systemd #10659",
        shown="Ignoring invalid environment assignment",
    ),
    Fault(
        "systemd could not set it up",
        "service",
        (
            r"status=2(?:0[0-9]|1[0-9]|2[0-9]|3[0-9]|4[0-3])/[A-Z_]+",
            r"Failed to set up (?:credentials|mount namespacing)",
            r"Failed to determine (?:user|group|supplementary group)",
            r"Failed with result 'resources'",
        ),
        "an account, a credential, a file or a namespace that the unit names is not there",
        "deploy again: it makes what is missing",
        "systemd.exec(5)",
        shown="status=217/USER; Failed to set up credentials",
    ),
    Fault(
        "home directories are closed",
        "service",
        (r"(?:Read-only file system|Permission denied)[^\n]*'?/(?:home|root)/",),
        "the service may not write to, or see, home directories",
        "keep packs outside of them; its caches are in /var/lib/dsv4/cache",
        "lemonade-sdk/lemonade #1864",
        shown="Read-only file system: '/home/…'",
    ),
    Fault(
        "too many starts",
        "service",
        (
            r"[Ss]tart request repeated too quickly",
            r"Failed with result 'start-limit-hit'",
        ),
        "systemd's own limit on starts was reached; it holds starts by hand as well",
        "systemctl reset-failed dsv4, mend the first cause, start it",
        "systemd/systemd #10529",
        kind="consequence",
        shown="Start request repeated too quickly",
    ),
    Fault(
        "memory cannot be locked",
        "service",
        (
            r"(?:mlock(?:all)?|memlock).*(?:fail|denied|not permitted|not locked)",
            r"memory is not locked",
        ),
        "the limit on locked memory is too low; limits.conf does not hold for units",
        "LimitMEMLOCK=infinity in the unit: deploy again",
        "ROCm/FastFlowLM #437",
        shown="mlockall failed: Cannot allocate memory",
    ),
    Fault(
        "too many open files",
        "service",
        (
            r"Too many open files",
            r"\[Errno 24\]",
        ),
        "the limit on open files is too low for this many requests",
        "LimitNOFILE in the unit: deploy again; lower serve_max_num_seqs",
        "vLLM's own hint",
        shown="[Errno 24] Too many open files",
    ),
    Fault(
        "a command line that is too long",
        "service",
        (r"Argument list too long",),
        "a text of more than 128 KiB went through one argument or variable",
        "hand it over in a file or on stdin",
        "MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark PR #51",
        shown="Argument list too long",
    ),
    Fault(
        "the key is not the engine's",
        "service",
        (
            r"the key is not the engine's",
            r"dsv4 launch: \S*api_key: ",
        ),
        "the key was changed after the start, or is no single word",
        "systemctl restart dsv4; `dsv4 key` shows it",
        OURS,
        shown="the key is not the engine's",
    ),
    Fault(
        "logging dropped lines",
        "service",
        (r"Suppressed \d+ messages from",),
        "journald dropped lines, perhaps the traceback",
        "our units have no rate limit; raise RateLimitBurst in journald.conf for others",
        "systemd/systemd #32745",
        kind="consequence",
        shown="Suppressed … messages from",
    ),
)

MACHINE: Final = (
    Fault(
        "the package manager is busy",
        "machine",
        (
            r"(?:Could not get lock|[Uu]nable to acquire the dpkg|lock was locked by another"
            r" process with pid)",
            r"has been held by pid \d+",
        ),
        "another apt runs, such as an unattended upgrade after the boot",
        "let it finish; never delete its lock",
        "ansible/ansible #51663",
        shown="Could not get lock /var/lib/dpkg/lock-frontend",
    ),
    Fault(
        "an interrupted package upgrade",
        "machine",
        (
            r"dpkg was interrupted",
            r"(?:half-configured|half-installed)",
        ),
        "an upgrade was cut off",
        "dpkg --configure -a (the deploy does it once), then deploy again",
        "openhab/openhabian #952",
        shown="dpkg was interrupted, you must manually run 'dpkg --configure -a'",
    ),
    Fault(
        "the machine cannot fork",
        "machine",
        (r"(?:fork|clone).*(?:Cannot allocate memory|Resource temporarily unavailable)",),
        "the host has no memory or process numbers left",
        "see `dsv4 status`: memory beside the floors",
        "the kernel's own words",
        shown="fork: Cannot allocate memory",
    ),
)

CONTROLLER: Final = (
    Fault(
        "a changed host key",
        "controller",
        (
            r"REMOTE HOST IDENTIFICATION HAS CHANGED",
            r"[Hh]ost key for .* does not match",
            r"BadHostKey",
        ),
        "the name leads to another machine, or the Spark was installed anew",
        "compare the fingerprint on the machine (ssh-keygen -lf "
        "/etc/ssh/ssh_host_ed25519_key.pub), then `ssh-keygen -R HOST`",
        "pyinfra-dev/pyinfra PR #1251",
        shown="REMOTE HOST IDENTIFICATION HAS CHANGED",
    ),
    Fault(
        "the name leads nowhere",
        "controller",
        (
            r"Could not resolve hostname",
            r"nodename nor servname provided",
        ),
        "a .local name moves when a second interface or machine takes it",
        "give a fixed address as ssh_hostname in inventories/spark.py",
        "NVIDIA/dgx-spark-playbooks #56",
        shown="Could not resolve hostname",
    ),
    Fault(
        "sudo asks for a password",
        "controller",
        (r"sudo: (?:a password is required|a terminal is required)",),
        "the deploy runs as a user whose sudo asks",
        "allow it without a password, or `--sudo-password` of pyinfra",
        "pyinfra-dev/pyinfra #1850",
        shown="sudo: a password is required",
    ),
    Fault(
        "the connection was lost",
        "controller",
        (
            r"connection lost \(",
            r"(?:Broken pipe|Connection reset by peer|Connection timed out).*(?:ssh|SSH|port 22)",
            r"(?:ssh|SSH).*(?:Broken pipe|Connection reset|Connection timed out|EOF)",
        ),
        "the line dropped; download and build go on by themselves on the machine",
        "run the deploy again: it joins what is under way",
        "pyinfra-dev/pyinfra #971",
        shown="connection lost; trying again",
    ),
    Fault(
        "another deploy is at work",
        "controller",
        (r"another deploy is at work on this machine",),
        "two controllers at once",
        "wait for the one it names, or stop it",
        OURS,
        shown="another deploy is at work on this machine",
    ),
    Fault(
        "the settings are wrong",
        "controller",
        (r"the settings are wrong, nothing was changed",),
        "a value is out of bounds or misspelt; the lines after it name each",
        "correct them in inventories/",
        OURS,
        shown="the settings are wrong, nothing was changed",
    ),
    Fault(
        "a temporary directory that is too small",
        "controller",
        (r"(?:/tmp|/run)/pyinfra-\S+.*(?:No space|failed|Failure)",),
        "pyinfra copies through /tmp",
        "make room in /tmp, or set _temp_dir for the host",
        "pyinfra-dev/pyinfra #1503",
        shown="pyinfra-…: No space left on device",
    ),
)

CONSEQUENCES: Final = (
    Fault(
        "the engine's core died",
        "engine",
        (
            r"Engine core initialization failed",
            r"EngineCore encountered (?:an issue|a fatal error)",
            r"EngineDeadError",
            r"died unexpectedly",
            r"EngineCore failed to start",
            r"Worker failed with error",
            r"[Ss]ee root cause above",
        ),
        "one process tells that another one failed; the reason is in an earlier line",
        source="read in vLLM 0.30.0",
        kind="consequence",
    ),
    Fault(
        "the unit ended",
        "service",
        (
            r"(?:Main|Control) process exited, code=",
            r"Failed with result '",
            r"Failed to start ",
            r"Scheduled restart job",
            r"Triggering OnFailure= dependencies",
        ),
        "systemd's words for a process that ended; the reason is in an earlier line",
        source="systemd's own words",
        kind="consequence",
    ),
)

TABLE: Final[tuple[Fault, ...]] = (
    *CONTEXT,
    *CONTROLLER[-1:],  # before the full disk, which it looks like
    *MEMORY,
    *ENGINE,
    *PACK,
    *DOWNLOAD,
    *BUILD,
    *SERVICE,
    *MACHINE,
    *CONTROLLER[:-1],
    *CONSEQUENCES,
)
"""Every row, in the order in which a line is tried."""

TOLD: Final = tuple(fault for fault in TABLE if fault.told or fault.kind == "context")


ORDINARY: Final = re.compile(r"(?:^|\) )(?:INFO|DEBUG)[ :]")
"""How a line of the engine's begins that reports no trouble, whatever words are in it."""


def judge(line: str) -> Fault | None:
    """Return the first row that fits a line, None for a line that says nothing we know."""
    rows = TOLD if ORDINARY.search(line) else TABLE
    return next((fault for fault in rows if fault.pattern.search(line)), None)


def table() -> str:
    """Return the README's troubleshooting: a table for each part, as people meet them."""
    out = []
    for part, title in PARTS.items():
        rows = [fault for fault in TABLE if fault.part == part and fault.shown]
        out.append(f"**{title}**\n\n| what it says | why | what to do |\n| --- | --- | --- |")
        out.append(
            "\n".join(
                f"| {' · '.join(f'`{cell(text)}`' for text in fault.shown.split('; '))} |"
                f" {cell(fault.cause)} | {cell(fault.remedy)} |"
                for fault in rows
            )
        )
        out.append("")
    return "\n".join(out).replace("| --- |\n\n|", "| --- |\n|")


def cell(text: str) -> str:
    """Return text as a cell of a Markdown table holds it."""
    return text.replace("|", "\\|")
