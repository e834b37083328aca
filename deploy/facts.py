"""Facts only: they read, and never change anything.

pyinfra does not cache facts, so everything is read by one remote command and kept for the run (see
`current`). Whatever changes the machine says so with `forget`.
"""

import json
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from pyinfra import context
from pyinfra.api import FactBase
from pyinfra.api.exceptions import FactProcessError

from deploy import bundle, layout, settings
from deploy._state import State

if TYPE_CHECKING:
    from pyinfra.api.host import Host

MAX_AGE_S = 30.0
"""A prompt can stand between prepare and execute for minutes; an older snapshot is read again."""


class MachineState(FactBase[State]):
    """Everything the deploy decides by (`dsv4 state --json`).

    Before the tools are there in the version shipped here, their one self-contained part is sent
    along and says what the machine is, so that a first dry run works on a bare host.

    + library: hash of the tools this deploy ships
    + describe: arguments of the machine's description (port, mounts, CUDA home)
    + packages: Debian packages whose version matters
    """

    def command(self, library: str, describe: str, packages: str) -> str:
        """Return the one command."""
        source = (layout.LOCAL_LIB / "machine.py").read_text()
        link = shlex.quote(str(layout.LIB / "dsv4"))
        return (
            # Tools that are damaged (a power cut, an edit) are as good as none: they are sent anew
            f'{{ [ "$(readlink {link})" = dsv4-{library} ] && [ -f {layout.DSV4} ]'
            f" && {layout.DSV4} state --json {describe} {packages}; }}"
            f" || python3 - {describe} <<'DSV4_MACHINE' ||"
            ' printf \'{"machine": {"arch": "%s"}}\\n\' "$(uname -m)"\n'
            f"{source}\nDSV4_MACHINE\n"
        )

    def process(self, output: Iterable[str]) -> State:
        """Return the last line's object; anything else the host prints is not ours."""
        lines = [line for line in output if line.startswith("{")]
        try:
            return State(json.loads(lines[-1]))
        except (IndexError, ValueError) as error:
            raise FactProcessError(f"the state of the machine is not readable: {error}") from error

    @staticmethod
    def default() -> State:
        """Return the state of a machine of which nothing is known."""
        return State({})


class Removal(FactBase[dict[str, Any]]):
    """What `deploy/remove.py` would take away now (`dsv4 remove --json`).

    + packs: whether the downloaded packs go, too
    """

    def command(self, packs: bool) -> str:
        """Return the one command; the tools come on stdin."""
        return bundle.run_command("remove", "--json", *(["--packs"] if packs else []))

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        """Return the last line's object."""
        lines = [line for line in output if line.startswith("{")]
        try:
            found: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError) as error:
            raise FactProcessError(f"what is to be removed cannot be told: {error}") from error
        return found

    @staticmethod
    def default() -> dict[str, Any]:
        """Return that nothing is known to be there."""
        return {}


@dataclass
class Run:
    """What one deploy run knows of one host."""

    token: str = field(default_factory=lambda: uuid4().hex)
    locked: bool = False
    changed: bool = False
    """Whether it has changed the machine so far, which leaves a receipt."""
    state: State | None = None
    read_at: float = 0.0


_runs: "WeakKeyDictionary[Host, Run]" = WeakKeyDictionary()


def run() -> Run:
    """Return the record of this run on the current host."""
    host = context.ctx_host.get()
    if host not in _runs:
        _runs[host] = Run()
    return _runs[host]


def arguments(chosen: settings.Settings) -> dict[str, str]:
    """Return what the state fact is asked, which follows from the settings alone."""
    mounts = " ".join(f"--path {shlex.quote(str(path))}" for path in layout.MOUNTS)
    describe = (
        f"--port {chosen.serve_port} --cuda-home {shlex.quote(str(chosen.cuda_home))} {mounts}"
    )
    if chosen.pack_dir is not None:
        describe += f" --pack-dir {shlex.quote(str(chosen.pack_dir))}"
    packages = " ".join(f"--package {shlex.quote(name)}" for name in chosen.packages)
    return {"library": bundle.library_hash(), "describe": describe, "packages": packages}


def current() -> State:
    """Return the current host's state, reading it at most once between changes."""
    known = run()
    if known.state is None or time.monotonic() - known.read_at > MAX_AGE_S:
        known.state = context.host.get_fact(MachineState, **arguments(settings.current()))
        known.read_at = time.monotonic()
    return known.state


def removal(*, packs: bool) -> dict[str, Any]:
    """Return what a removal would do on the current host."""
    found: dict[str, Any] = context.host.get_fact(Removal, packs=packs, _stdin=bundle.archive())
    return found


def unlock(host: "Host") -> None:
    """Have the next change on a host take the deploy lock again: its connection is a new one."""
    if host in _runs:
        _runs[host].locked = False


def forget() -> None:
    """Have the next `current` read again: something changed."""
    run().state = None
