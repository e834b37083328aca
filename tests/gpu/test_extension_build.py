"""The extension built by our recipe on a CUDA machine, loaded there, and its kernels run.

    python tests/gpu/test_extension_build.py      runs without pytest and prints one JSON object

It needs nvcc under CUDA_HOME (/usr/local/cuda when that is not set), g++, this Python's headers and
torch, and no network: exllamav3's wheel is read from the directory that DSV4_SOURCES_CACHE names,
where `python -m tests.sources.aarch64 exllamav3` puts it. Three minutes on 16 cores.
"""

import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
for place in (REPO, REPO / "files/opt/dsv4/lib"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import torch  # noqa: E402

from dsv4 import extension, memory, store  # noqa: E402
from tests.sources import aarch64  # noqa: E402

RELEASE = "1.4.5"
MEASURED: dict[str, Any] = {}
"""What the tests measured, by name."""


def environment() -> dict[str, str]:
    """Return the compilers' environment, for the GPU that is here."""
    major, minor = torch.cuda.get_device_capability()
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return {**os.environ, "CUDA_HOME": home, "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}


@functools.cache
def scratch() -> Path:
    """Return a directory for what is built."""
    return Path(tempfile.mkdtemp(prefix="dsv4-extension-"))


def build(say: list[str]) -> Path:
    """Run the recipe."""
    jobs = extension.jobs_for(len(os.sched_getaffinity(0)), memory.read_meminfo().available)
    return extension.build(
        aarch64.exllamav3(RELEASE),
        aarch64.EXLLAMAV3[RELEASE],
        Path(sys.executable),
        scratch() / "wheels",
        environment(),
        jobs,
        scratch() / "build.log",
        say.append,
    )


@functools.cache
def built() -> Path:
    """Return the wheel, and note what it took."""
    begun = time.monotonic()
    said: list[str] = []
    wheel = build(said)
    note = store.read_json_or(wheel.with_suffix(".json"), {})
    MEASURED["seconds"] = round(time.monotonic() - begun, 1)
    MEASURED["said last"] = said[-1]
    MEASURED["wheel MB"] = round(wheel.stat().st_size / 1e6, 1)
    MEASURED["note"] = {name: note[name] for name in ("jobs", "seconds", "torch", "arch_list")}
    MEASURED["compilers"] = note["compilers"]
    return wheel


@functools.cache
def site() -> Path:
    """Return a directory with the wheel unpacked, as an installer leaves it."""
    place = scratch() / "site"
    with zipfile.ZipFile(built()) as archive:
        archive.extractall(place)
    return place


def call(program: str, **more: str) -> str:
    """Run a program with the extension loaded, in a process of its own."""
    begin = f"import sys; sys.path.insert(0, {str(site())!r})\n"
    begin += f"import torch, {extension.MODULE} as module\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", begin + program],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_1_all_of_it_is_built() -> None:
    """131 sources, patched, for this GPU; a module is what comes out."""
    note = store.read_json(built().with_suffix(".json"))
    assert note is not None
    assert note["source"]["files"] == 131
    assert note["patch"]["verdict"] == "applied"
    assert note["arch_list"] == environment()["TORCH_CUDA_ARCH_LIST"]


def test_2_it_is_loaded_and_has_what_the_plugin_calls() -> None:
    """`import torch, exllamav3_ext`, and exl3_moe takes 30 arguments."""
    assert call("print(module.exl3_moe.__doc__.count('arg'))") == "30\n"


def test_3_its_kernels_run_on_this_gpu() -> None:
    """Code for another GPU would fail at the first launch; this one is right as well."""
    program = (
        "x = torch.linspace(-90, 90, 4096, device='cuda')\n"
        "y = torch.empty_like(x)\n"
        "module.softcap(x, y, 30.0)\n"
        "wanted = 30 * torch.tanh(x.double() / 30)\n"
        "print(float((y - wanted).norm() / wanted.norm()))"
    )
    error = float(call(program))
    MEASURED["softcap, relative error"] = error
    assert error < 1e-4


def test_4_x86_code_is_as_it_was() -> None:
    """On x86 the patch changes nothing: the processor's own instructions are found and used."""
    supported = call("print(module.exl3_moe_cpu_has_avx2())").strip()
    flags = Path("/proc/cpuinfo").read_text().split()
    assert supported == str({"avx2", "fma"} <= set(flags))


def test_5_a_lock_that_a_killed_build_of_torch_left_delays_nobody() -> None:
    """Torch's own builder waits for ever when such a file is there; ours is not asked."""
    with tempfile.TemporaryDirectory() as left:
        lock = Path(left) / extension.MODULE / "lock"
        lock.parent.mkdir()
        lock.touch()
        assert call("print(module.__file__)", TORCH_EXTENSIONS_DIR=left).strip().endswith(".so")


def test_6_the_same_is_not_built_again() -> None:
    """The second runtime takes the wheel within seconds."""
    first = built()
    begun = time.monotonic()
    said: list[str] = []
    assert build(said) == first
    MEASURED["second build s"] = round(time.monotonic() - begun, 2)
    assert said == [f"take {first.name}, compiled before from the same sources"]


def main() -> int:
    """Run every test here and print what was measured."""
    results: dict[str, str] = {}
    for name, test in sorted(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
    answer = {
        "ok": set(results.values()) == {"passed"},
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "results": results,
        "measured": MEASURED,
    }
    sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
