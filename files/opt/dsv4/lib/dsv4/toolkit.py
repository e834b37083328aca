"""The CUDA toolkit as the service will see it, not as a login shell does.

Builds and the engine compile for the GPU with what their environment names. A toolkit of another
release, an assembler older than the GPU or a list of architectures without it all fail late: at
the first kernel, or by silently wrong code. So each is asked before the first compiler runs.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

TIMEOUT_S: Final = 30
ARCH_LISTS: Final = ("TORCH_CUDA_ARCH_LIST", "FLASHINFER_CUDA_ARCH_LIST")
ASSEMBLERS: Final = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


def release(text: str) -> str | None:
    """Return the release that a tool of the toolkit prints for `--version`."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else None


def target_of(arch: str) -> str:
    """Return what nvcc calls an entry of an architecture list: 12.1a is sm_121a."""
    return "sm_" + arch.replace(".", "")


def ask(program: str, *words: str) -> str | None:
    """Return what a program prints, None when it cannot be run."""
    try:
        done = subprocess.run(
            [program, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def environment(
    spec: Mapping[str, Any], runtime: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment that compilers run in: the service's, with the runtime's programs."""
    found = {name: inherited[name] for name in ("LANG", "HOME", "TMPDIR") if name in inherited}
    found |= {str(name): str(value) for name, value in spec.get("build_env", {}).items()}
    first = [str(runtime / "bin")]
    if home := spec.get("cuda_home"):
        found["CUDA_HOME"] = str(home)
        first.append(f"{home}/bin")
        found |= dict.fromkeys(ASSEMBLERS, f"{home}/bin/ptxas")
    found["PATH"] = ":".join([*first, "/usr/local/bin", "/usr/bin", "/bin"])
    found["VIRTUAL_ENV"] = str(runtime)
    return found


def faults(env: Mapping[str, str], wanted: tuple[str, str], arch: str) -> list[str]:
    """Return what is wrong with the toolkit of an environment, one sentence each.

    `wanted` is the release to begin with and the one to stay below; `arch` as in 12.1a.
    """
    home = env.get("CUDA_HOME", "")
    nvcc = Path(home) / "bin/nvcc"
    found = release(ask(str(nvcc), "--version") or "") if home else None
    if found is None:
        return [
            f"CUDA_HOME: {nvcc if home else 'is not set'}{' does not answer' if home else ''};"
            " name the toolkit's directory with cuda_home"
        ]
    numbers = tuple(int(part) for part in found.split("."))
    low, high = (tuple(int(part) for part in text.split(".")) for text in wanted)
    problems = []
    if not low <= numbers < high:
        problems.append(
            f"CUDA_HOME: {nvcc} is of release {found}, wanted from {wanted[0]} and below"
            f" {wanted[1]}; name another toolkit with cuda_home"
        )
    first = shutil.which("nvcc", path=env.get("PATH", ""))
    if first is None or Path(first).resolve() != nvcc.resolve():
        problems.append(f"PATH: finds nvcc at {first or 'no place'} before {nvcc}")
    codes = (ask(str(nvcc), "--list-gpu-code") or "").split()
    base = target_of(arch).rstrip("af")
    if base not in codes:
        problems.append(f"CUDA_HOME: {nvcc} cannot compile for {base}; it is too old for this GPU")
    problems += [
        f"{name}: wanted {arch}, got {env.get(name) or 'nothing'}"
        for name in ARCH_LISTS
        if env.get(name) != arch
    ]
    for name in ASSEMBLERS:
        ptxas = env.get(name, "")
        other = release(ask(ptxas, "--version") or "") if ptxas else None
        if other != found:
            had = f"{ptxas} is of release {other or 'unknown'}" if ptxas else "is not set"
            problems.append(f"{name}: {had}, nvcc is of {found}")
    problems += [
        f"PATH: finds no {program}, which compiling needs"
        for program in ("ninja", "g++")
        if shutil.which(program, path=env.get("PATH", "")) is None
    ]
    return problems


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))
