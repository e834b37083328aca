"""Ask a runtime's own engine whether it takes the flags it will be started with.

Flags come and go between releases, and the engine tells only when it is started. So its own
argument parser reads serve.yaml before the runtime is put in service: nothing is loaded, no GPU is
opened, and the runtime that serves stays where it is when the answer is no.
"""

import os
import pwd
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from dsv4 import layout

PARSE: Final = """\
import sys

from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(prog="vllm")
commands = parser.add_subparsers(dest="subparser")
known = {command.name: command for command in cmd_init()}
for command in known.values():
    command.subparser_init(commands)
for path in sys.argv[1:]:
    known["serve"].validate(parser.parse_args(["serve", "--config", path]))
"""
"""What `vllm serve --config FILE` does before anything else, in all releases that a route has."""

PATIENCE_S: Final = 300.0
"""Importing the engine takes 12 s of a processor, and more where its code is not compiled yet."""


def argv(python: Path, *files: Path) -> list[str]:
    """Return the command that reads these files as the engine would."""
    return [str(python), "-I", "-B", "-c", PARSE, *(str(path) for path in files)]


def environment(home: str) -> dict[str, str]:
    """Return an environment in which the engine reads and writes nothing of anybody's."""
    return {
        "HOME": home,
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "TMPDIR": home,  # torch makes a directory there as it is imported, and leaves it
        "VLLM_CACHE_ROOT": f"{home}/cache",
        "VLLM_CONFIG_ROOT": f"{home}/config",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def last_line(text: str) -> str:
    """Return the line that says what went wrong: argparse and tracebacks have it last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def fault(runtime: Path, text: str, patience_s: float = PATIENCE_S) -> str | None:
    """Return why the engine of a runtime would refuse this serve.yaml, None when it takes it.

    It is asked as the service's own user.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4-flags.") as home:
        place = Path(home) / layout.SERVE_YAML.name
        place.write_text(text)
        user: dict[str, int | list[int]] = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam(layout.USER)
            for path in (Path(home), place):
                os.chown(path, account.pw_uid, account.pw_gid)
            user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        try:
            done = subprocess.run(
                argv(runtime / "bin/python", place),
                env=environment(home),
                cwd=home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=patience_s,
                check=False,
                **user,  # type: ignore[call-overload]
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the engine of runtime {runtime.name} cannot be asked about its flags ({error})"
    if done.returncode == 0:
        return None
    return (
        f"the engine of runtime {runtime.name} does not take the flags in {layout.SERVE_YAML}:"
        f" {last_line(done.stderr)}"
    )
