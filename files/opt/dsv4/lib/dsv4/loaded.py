"""Load the served model in this process and print what its tensors hold: runs in the runtime.

The context is as short as the engine takes and the cache a fixed size, so that what is counted is
the model. `dsv4 census --loaded` starts it, as the service's user and under a watch (`guarded`);
without whoever started it, it does not go on. On a GB10 nobody has run this yet.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from dsv4 import layout, memory

KEPT: Final = (
    "model",
    "served_model_name",
    "quantization",
    "kv_cache_dtype",
    "dtype",
    "tokenizer",
    "block_size",
    "gpu_memory_utilization",
)
CONTEXT: Final = 2048
CACHE_BYTES: Final = 2 << 30
PR_SET_PDEATHSIG: Final = 1


def arguments(serve: dict[str, Any], *, device: str) -> dict[str, Any]:
    """Return the engine's arguments for counting, from those it serves with."""
    kept: dict[str, Any] = {key: serve[key] for key in KEPT if key in serve}
    kept |= {"max_model_len": CONTEXT, "max_num_seqs": 1, "enforce_eager": True}
    if device == "cuda":
        kept["kv_cache_memory_bytes"] = CACHE_BYTES
    return kept


def tensors_of(model: Any) -> list[tuple[str, str, int]]:
    """Return a module's parameters and buffers once each: name, type, bytes."""
    seen: set[int] = set()
    found = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen and storage.nbytes():
            continue
        seen.add(storage.data_ptr())
        found.append((name, str(tensor.dtype).removeprefix("torch."), storage.nbytes()))
    return found


def bind(parent: int) -> None:
    """Have this process end with the one that watches it."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != parent:
        raise SystemExit("dsv4 loaded: nobody watches over this; use dsv4 census --loaded")
    # If the machine has no room after all, this is what the kernel shall take
    Path("/proc/self/oom_score_adj").write_text("1000")


def main(argv: list[str]) -> int:
    """Print one JSON line as the last of stdout."""
    bind(int(argv[0]) if argv else 0)
    import torch
    import yaml
    from vllm import LLM

    serve = yaml.safe_load(layout.SERVE_YAML.read_text())
    serve = {key.replace("-", "_"): value for key, value in serve.items()}
    cuda = torch.cuda.is_available()
    chosen = arguments(serve, device="cuda" if cuda else "cpu")
    model = LLM(**chosen)
    (tensors,) = model.apply_model(tensors_of)
    found: dict[str, Any] = {"tensors": tensors, "torch": torch.__version__}
    if cuda:
        free, total = torch.cuda.mem_get_info()
        found |= {
            "cuda_free_gib": round(free / memory.GIB, 2),
            "cuda_total_gib": round(total / memory.GIB, 2),
            "allocated_gib": round(torch.cuda.memory_allocated() / memory.GIB, 2),
            "reserved_gib": round(torch.cuda.memory_reserved() / memory.GIB, 2),
        }
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # the engine's own threads need not be waited for


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
