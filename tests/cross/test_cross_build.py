"""The whole extension for a GB10, built on another machine and loaded under emulation.

Our recipe runs as it does on a Spark: `dsv4.extension` with a Python for aarch64, which is emulated
here, and compilers that make code for aarch64 and sm_121a, which are not. All 131 sources are
compiled, linked against torch for aarch64 and imported.

It takes two cores about half an hour, and goes on where it was cut off. The wheel is the layer's
product: it lies in `cross/wheels` of the directory that DSV4_SOURCES_CACHE names (by default
/var/cache/dsv4-sources), for the Python that `emulated.py` says how to choose, and the setting
`exllamav3_wheel` takes it.
"""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from dsv4 import extension, memory, store
from tests.cross import emulated
from tests.sources import aarch64

AARCH64 = 183  # e_machine in an ELF header


@dataclass(frozen=True)
class Built:
    """The wheel, what its note says, and the emulated Python it was installed for."""

    wheel: Path
    note: dict[str, Any]
    python: Path
    version: str
    site: Path

    def call(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a program under emulation with the wheel installed."""
        begin = f"import sys; sys.path.insert(0, {str(self.site)!r})\n"
        begin += f"import torch, {extension.MODULE} as module\n"
        return subprocess.run(
            [self.python, "-I", "-c", begin + program],
            capture_output=True,
            text=True,
            check=False,
        )


def say(words: str) -> None:
    """Show where a long build is, to who runs this by hand with -s."""
    sys.stderr.write(f"{words}\n")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build it, or take what an earlier run built, and install it as a runtime does."""
    python, version = emulated.python()
    wheels = emulated.HOME / "wheels"
    environment = {
        **os.environ,
        "CUDA_HOME": str(aarch64.toolkit() / aarch64.CUDA.rstrip("/")),
        "CXX": aarch64.CXX,
        "TORCH_CUDA_ARCH_LIST": "12.1a",
    }
    wheel = extension.build(
        aarch64.exllamav3("1.4.5"),
        aarch64.EXLLAMAV3["1.4.5"],
        python,
        wheels,
        environment,
        extension.jobs_for(len(os.sched_getaffinity(0)), memory.read_meminfo().available),
        wheels / f"{extension.MODULE}.log",
        say,
    )
    site = tmp_path_factory.mktemp("site")
    emulated.install(site, version, ["--no-index", wheel], None)
    note = store.read_json(wheel.with_suffix(".json"))
    assert note is not None
    return Built(wheel, note, python, version, site)


def test_the_wheel_is_for_a_spark(built: Built) -> None:
    """Machine, GPU and torch are the Spark's; the sources are all of the release, patched."""
    _, _, _, tags = parse_wheel_filename(built.wheel.name)
    tag = f"cp{built.version.replace('.', '')}"
    assert {str(one) for one in tags} == {f"{tag}-{tag}-linux_aarch64"}
    assert built.note["arch_list"] == "12.1a"
    assert built.note["torch"] == "2.13.0+cu130"
    assert built.note["source"]["files"] == 131
    assert built.note["patch"]["verdict"] == "applied"


def test_the_module_is_of_its_machine(built: Built) -> None:
    """The file in the wheel is a library for aarch64, and asks for the libraries torch brings."""
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".so")]
        data = archive.read(name)
    assert data[:4] == b"\x7fELF"
    assert int.from_bytes(data[18:20], "little") == AARCH64
    done = subprocess.run(
        ["aarch64-linux-gnu-readelf", "--dynamic", str(built.site / name)],
        capture_output=True,
        text=True,
        check=True,
    )
    for library in ("libtorch_cuda.so", "libtorch_python.so", "libc10_cuda.so", "libcudart.so.13"):
        assert f"Shared library: [{library}]" in done.stdout
    assert "RUNPATH" not in done.stdout


def test_it_is_imported(built: Built) -> None:
    """Every function links; the one the plugin calls takes the 30 arguments the plugin gives."""
    done = built.call(
        "import json; names = [n for n in dir(module) if not n.startswith('_')]\n"
        "print(json.dumps([len(names), module.exl3_moe.__doc__]))"
    )
    assert done.returncode == 0, done.stderr
    names, signature = json.loads(done.stdout)
    assert names >= 152
    assert signature.count("arg") == 30


def test_a_stub_raises_and_the_process_lives_on(built: Built) -> None:
    """What needs an x86 processor says so as a Python error; an abort would end the server."""
    done = built.call(
        "assert module.exl3_moe_cpu_has_avx2() is False\n"
        "try:\n"
        "    module.exl3_moe_cpu_free_layer(1)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "print('alive')"
    )
    assert done.returncode == 0, done.stderr
    assert "exl3_moe_cpu_free_layer: computing experts on the processor" in done.stdout
    assert done.stdout.endswith("alive\n")


def test_the_same_is_taken_and_not_built_again(built: Built) -> None:
    """The wheel is known by what went into it, whatever machine asks."""
    said: list[str] = []
    again = extension.build(
        aarch64.exllamav3("1.4.5"),
        aarch64.EXLLAMAV3["1.4.5"],
        built.python,
        built.wheel.parent,
        {"PATH": os.environ["PATH"], "TORCH_CUDA_ARCH_LIST": "12.1a"},
        1,
        built.wheel.with_suffix(".log"),
        said.append,
    )
    assert again == built.wheel
    assert said == [f"take {built.wheel.name}, compiled before from the same sources"]
