"""Run a program that takes a lot of memory outside the service, under a watch of its own.

The watchdog's unit looks after the engine's unit alone, so this decides by the same function about
one child: it runs as another user, in a process group of its own, and the whole group is ended by
SIGKILL at the floors, when memory cannot be read for a while, or when the caller says so.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsv4 import guard, watchdog

BLIND_S: Final = 2.0
"""Without a reading for so long the program is not let go on."""


@dataclass(frozen=True)
class Ended:
    """How it ended: its status as `subprocess` has it, what it said, and why it was ended."""

    status: int
    out: str
    killed: str = ""


class Watch:
    """Says, sample by sample, why the program must not go on."""

    def __init__(self, limits: guard.Memory, source: watchdog.Source, begun: float) -> None:
        self.config = watchdog.config_of(limits)
        self.shared = watchdog.Shared(guard.Guard(memory=limits), self.config)
        self.source = source
        self.seen = begun
        self.history: deque[watchdog.Sample] = deque(maxlen=max(self.config.soft_samples, 2))

    def look(self, now: float) -> str | None:
        """Return why it has to end now; at the soft floor, too, for it answers to nobody."""
        sample = watchdog.take(self.shared, self.source, now)
        last = self.history[-1] if self.history else None
        if sample is not None and watchdog.doubtful(last, sample):
            time.sleep(watchdog.DOUBT_S)
            sample = watchdog.take(self.shared, self.source, now + watchdog.DOUBT_S)
        if sample is None:
            blind = now - self.seen
            return f"memory could not be read for {blind:.1f} s" if blind >= BLIND_S else None
        self.seen = now
        verdict = watchdog.decide(list(self.history), sample, self.config)
        self.history.append(sample)
        return verdict.reason if verdict.action != watchdog.NONE else None


def run(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    user: tuple[int, int, Sequence[int]] | None,
    watch: Watch,
    forbidden: Callable[[], str | None] = lambda: None,
) -> Ended:
    """Run it to its end, or to the first reason against it; nothing of its group is left.

    + user: whom it runs as: user, group, supplementary groups; None for whoever calls
    + forbidden: asked at each sample; a reason why it may not go on
    """
    uid, gid, groups = user or (None, None, None)
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            argv,
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=out,
            start_new_session=True,
            umask=0o077,
            user=uid,
            group=gid,
            extra_groups=groups,
        )
        killed = None
        try:
            while not over(child.pid) and killed is None:
                time.sleep(watch.config.sample_s)
                killed = watch.look(time.monotonic()) or forbidden()
        finally:
            # Before it is waited for: until then nobody else can have its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
        out.seek(0)
        return Ended(status, out.read().decode(errors="replace"), killed or "")


def over(pid: int) -> bool:
    """Say whether a child has ended, and leave it to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
