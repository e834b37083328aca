"""The CUDA toolkit is judged by what the service's environment names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4 import toolkit

WANTED = ("13.0", "14.0")
Make = Callable[..., dict[str, str]]


def program(path: Path, text: str) -> None:
    """Write a small program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a toolkit and a runtime, and return the environment that names them."""

    def build(
        release: str = "13.0", ptxas: str = "", codes: str = "sm_120 sm_121"
    ) -> dict[str, str]:
        home, runtime = tmp_path / "cuda", tmp_path / "runtime"
        program(
            home / "bin/nvcc",
            f'case "$1" in --version) echo "tools, release {release}, V{release}.1";;'
            f" *) printf '%s\\n' {codes};; esac",
        )
        program(
            home / "bin/ptxas", f'echo "Cuda compilation tools, release {ptxas or release}, V1"'
        )
        program(runtime / "bin/ninja", "")
        program(runtime / "bin/g++", "")
        spec = {
            "cuda_home": str(home),
            "build_env": {"TORCH_CUDA_ARCH_LIST": "12.1a", "FLASHINFER_CUDA_ARCH_LIST": "12.1a"},
        }
        return toolkit.environment(spec, runtime, {"LANG": "C", "SECRET": "x", "PATH": "/nowhere"})

    return build


def test_the_environment_is_the_services_and_not_a_shells(make: Make, tmp_path: Path) -> None:
    """The toolkit's programs and the runtime's come first; nothing else is inherited."""
    env = make()
    assert env["PATH"].split(":")[:2] == [str(tmp_path / "runtime/bin"), str(tmp_path / "cuda/bin")]
    assert env["TRITON_PTXAS_PATH"] == str(tmp_path / "cuda/bin/ptxas")
    assert "SECRET" not in env
    assert toolkit.faults(env, WANTED, "12.1a") == []


@pytest.mark.parametrize(
    ("toolkit_of", "says"),
    [
        ({"release": "12.8"}, "is of release 12.8, wanted from 13.0 and below 14.0"),
        ({"release": "14.0"}, "is of release 14.0, wanted from 13.0 and below 14.0"),
        ({"codes": "sm_90 sm_100"}, "cannot compile for sm_121"),
        ({"ptxas": "12.8"}, "ptxas is of release 12.8, nvcc is of 13.0"),
    ],
)
def test_a_toolkit_that_would_fail_late_is_named_early(
    make: Make, toolkit_of: dict[str, str], says: str
) -> None:
    assert any(says in fault for fault in toolkit.faults(make(**toolkit_of), WANTED, "12.1a"))


def test_no_toolkit_is_one_sentence_with_the_setting(make: Make) -> None:
    env = make() | {"CUDA_HOME": "/nowhere"}
    assert toolkit.faults(env, WANTED, "12.1a") == [
        "CUDA_HOME: /nowhere/bin/nvcc does not answer; name the toolkit's directory with cuda_home"
    ]
    del env["CUDA_HOME"]
    assert "CUDA_HOME: is not set" in toolkit.faults(env, WANTED, "12.1a")[0]


def test_a_list_of_architectures_without_the_gpu_is_a_fault(make: Make) -> None:
    """12.0 is another GPU: its kernels do not run, or run slowly."""
    env = make() | {"TORCH_CUDA_ARCH_LIST": "12.0"}
    env.pop("FLASHINFER_CUDA_ARCH_LIST")
    assert toolkit.faults(env, WANTED, "12.1a") == [
        "TORCH_CUDA_ARCH_LIST: wanted 12.1a, got 12.0",
        "FLASHINFER_CUDA_ARCH_LIST: wanted 12.1a, got nothing",
    ]


def test_another_nvcc_before_ours_is_a_fault(make: Make, tmp_path: Path) -> None:
    """A distribution's own package puts an older one into /usr/bin."""
    env = make()
    program(tmp_path / "other/nvcc", "")
    env["PATH"] = f"{tmp_path / 'other'}:{env['PATH']}"
    assert any(
        f"nvcc at {tmp_path / 'other/nvcc'}" in it for it in toolkit.faults(env, WANTED, "12.1a")
    )


def test_what_compiling_needs_is_asked_for(make: Make, tmp_path: Path) -> None:
    env = make()
    (tmp_path / "runtime/bin/ninja").unlink()
    env["PATH"] = f"{tmp_path / 'runtime/bin'}:{tmp_path / 'cuda/bin'}"
    assert toolkit.faults(env, WANTED, "12.1a") == ["PATH: finds no ninja, which compiling needs"]
