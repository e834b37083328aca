"""Become the engine: the service's own process.

Takes the API key from the systemd credential into this environment only, puts the runtime's and
the toolkit's programs first in PATH (the engine compiles at run time and looks for ninja and nvcc
there), lets it import the list of routes it serves, and execs vLLM, never through a shell. Its hash
is part of what a restart is decided by, so what else belongs to a start is in `lifecycle`.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsv4 import layout

HOOKS: Final = ("check", "record", "stopping", "ended")
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOT_FOR_THE_ENGINE: Final = ("CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "PYTHONPATH")
REFUSED: Final = 78
"""The exit status that the unit does not restart after (`RestartPreventExitStatus`)."""


class LaunchError(Exception):
    """The engine cannot be started with what is there."""


def refused(path: Path = layout.REFUSED_JSON) -> str | None:
    """Return why this start shall end without another automatic one, None when it may go on.

    systemd restarts a unit whose hook failed; only the exit status of the main process can tell it
    not to. So the first hook notes the refusal, the others stand aside, and `main` ends with it.
    """
    try:
        return str(json.loads(path.read_bytes()).get("reason") or "no reason given")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError):
        return f"{path} cannot be read"


def read_key(directory: str | None) -> str | None:
    """Return the API key from the credentials directory; None when the unit has none."""
    if not directory:
        return None
    path = Path(directory) / "api_key"
    try:
        key = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: cannot be read ({error.__class__.__name__})") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise LaunchError(f"{path}: must hold one word of printable ASCII; write {layout.API_KEY}")
    return key


def engine_environment(
    inherited: Mapping[str, str], runtime: Path, key: str | None
) -> dict[str, str]:
    """Return the engine's environment: what the unit gave, PATH for its compilers, and the key."""
    kept = {name: value for name, value in inherited.items() if name not in NOT_FOR_THE_ENGINE}
    cuda = kept.get("CUDA_HOME", "")
    first = [str(runtime / "bin"), *([f"{cuda}/bin"] if cuda else [])]
    rest = [part for part in kept.get("PATH", SYSTEM_PATH).split(":") if part not in first]
    kept["PATH"] = ":".join(first + rest)
    kept["VIRTUAL_ENV"] = str(runtime)
    kept["PYTHONPATH"] = str(layout.LIB)  # `routes`, which the server puts in front of its own
    kept.pop("VLLM_API_KEY", None)
    if key is not None:
        kept["VLLM_API_KEY"] = key
    return kept


def engine(inherited: Mapping[str, str]) -> tuple[str, list[str], dict[str, str]]:
    """Return what to exec: program, arguments, environment.

    The link to the runtime is followed now, so that a later switch cannot give this process files
    of two runtimes.
    """
    runtime = layout.CURRENT.resolve()
    program = runtime / "bin/vllm"
    if not os.access(program, os.X_OK):
        raise LaunchError(f"{program}: cannot be run; deploy again to build a runtime")
    key = read_key(inherited.get("CREDENTIALS_DIRECTORY"))
    argv = [str(program), "serve", "--config", str(layout.SERVE_YAML)]
    return str(program), argv, engine_environment(inherited, runtime, key)


def main(argv: list[str]) -> int:
    """Exec the engine, or run one of the hooks around it."""
    if argv and argv[0] in HOOKS:
        from dsv4 import lifecycle

        return lifecycle.main(argv)
    if argv:
        sys.stderr.write(f"usage: dsv4 launch [{' | '.join(HOOKS)}]\n")
        return 2
    if reason := refused():
        sys.stderr.write(f"dsv4 launch: not started: {reason}\n")
        return REFUSED
    try:
        program, arguments, environment = engine(os.environ)
        os.umask(0o077)  # the engine's own files are for nobody else
        os.execve(program, arguments, environment)  # noqa: S606
    except (LaunchError, OSError) as error:
        sys.stderr.write(f"dsv4 launch: {error}\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
