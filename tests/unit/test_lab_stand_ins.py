"""The lab's nvidia-smi and CUDA tools answer as those of a GB10 do."""

import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[1] / "lab/machine/usr/local"


def smi(tmp_path: Path, *words: str, **files: str) -> tuple[int, str]:
    """Run the stand-in with its files under `tmp_path` in place of /etc/lab."""
    for name, text in files.items():
        (tmp_path / name.replace("_", "-")).write_text(text)
    script = (TREE / "bin/nvidia-smi").read_text().replace("/etc/lab/", f"{tmp_path}/")
    done = subprocess.run(
        ["sh", "-s", "--", *words], input=script, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_memory_has_no_figures(tmp_path: Path) -> None:
    query = "--query-gpu=name,memory.total,memory.used,compute_cap,driver_version"
    assert smi(tmp_path, query, "--format=csv,noheader") == (
        0,
        "NVIDIA GB10, [N/A], [N/A], 12.1, 580.95.05\n",
    )


def test_header_and_units(tmp_path: Path) -> None:
    assert smi(tmp_path, "--query-gpu=clocks.sm,power.draw,memory.total", "--format=csv") == (
        0,
        "clocks.sm [MHz], power.draw [W], memory.total [MiB]\n2405 MHz, 4.52 W, [N/A]\n",
    )
    bare = smi(tmp_path, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
    assert bare == (0, "2405\n")


def test_a_field_can_be_given_another_answer(tmp_path: Path) -> None:
    fields = "clocks.sm=850\n"
    query = ("--query-gpu=clocks.sm,pstate", "--format=csv,noheader,nounits")
    assert smi(tmp_path, *query, nvidia_smi_fields=fields) == (0, "850, P8\n")


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    status, words = smi(tmp_path, "--query-gpu=name,nonsense", "--format=csv")
    assert status == 2
    assert '"nonsense" is not a valid field' in words


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("csv,noheader,nounits", "4242, python, 19135\n"),
        ("csv,noheader", "4242, python, 19135 MiB\n"),
        ("csv", "pid, process_name, used_gpu_memory [MiB]\n4242, python, 19135 MiB\n"),
    ],
)
def test_compute_processes_come_from_a_file(tmp_path: Path, form: str, expected: str) -> None:
    query = "--query-compute-apps=pid,process_name,used_memory"
    assert smi(tmp_path, query, f"--format={form}", compute_apps="4242, python, 19135\n") == (
        0,
        expected,
    )


def test_no_compute_processes_without_it(tmp_path: Path) -> None:
    query = "--query-compute-apps=pid,process_name,used_memory"
    assert smi(tmp_path, query, "--format=csv,noheader") == (0, "")


def test_faults_can_be_played(tmp_path: Path) -> None:
    status, words = smi(tmp_path, nvidia_smi_mode="mismatch\n")
    assert (status, words.splitlines()[0]) == (
        18,
        "Failed to initialize NVML: Driver/library version mismatch",
    )
    assert smi(tmp_path, nvidia_smi_mode="absent") == (127, "")


def test_the_table_says_what_it_is(tmp_path: Path) -> None:
    status, words = smi(tmp_path)
    assert status == 0
    assert "stand-in" in words.splitlines()[0]
    assert "NVIDIA GB10" in words


@pytest.mark.parametrize("tool", ["nvcc", "ptxas"])
def test_cuda_tools_name_their_release_and_do_nothing_else(tool: str) -> None:
    path = TREE / "cuda-13.0/bin" / tool
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    assert "release 13.0, V13.0" in said
    assert "Stand-in" in said
    assert subprocess.run([path, "x.cu"], capture_output=True, check=False).returncode == 1
