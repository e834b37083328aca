"""Put a complete runtime in service, and clear away the oldest ones.

Only links move here; the running engine keeps the files it has open until it is restarted. With
`--flags`, the runtime's engine is asked first whether it takes the flags it would be started with.
"""

import argparse
import fcntl
import shutil
import sys
from pathlib import Path

from dsv4 import layout, runtime, serve_flags, store, tree


def main(argv: list[str]) -> int:
    """Point `current` at a runtime and `previous` at the one before."""
    parser = argparse.ArgumentParser(prog="dsv4 switch", description=__doc__)
    parser.add_argument("id")
    parser.add_argument("--keep", type=int, default=3, help="runtimes to keep, at least 2")
    parser.add_argument(
        "--flags", metavar="FILE", help="its serve.yaml (-: on stdin), checked first"
    )
    options = parser.parse_args(argv)
    found = runtime.examine(layout.RUNTIMES / options.id)
    if not found["complete"]:
        why = "; ".join(found["drift"]) or "it has no manifest"
        sys.stderr.write(f"dsv4 switch: runtime {options.id} is not complete: {why}\n")
        return 1
    if options.flags and (fault := flags_fault(options.id, options.flags)):
        sys.stderr.write(f"dsv4 switch: {fault}; nothing was switched\n")
        return 1
    before = runtime.link_target(layout.CURRENT)
    try:
        if before != options.id:
            tree.refuse_directory(layout.CURRENT)  # before anything moves
            # One that somebody deleted is no way back; the one before it still is
            if before is not None and (layout.RUNTIMES / before).is_dir():
                tree.link_to(layout.PREVIOUS, f"runtimes/{before}")
            tree.link_to(layout.CURRENT, f"runtimes/{options.id}")
        clear(options.keep)
    except OSError as error:
        sys.stderr.write(f"dsv4 switch: {error}; then run the deploy again\n")
        return 1
    return 0


def flags_fault(identity: str, source: str) -> str | None:
    """Return why a runtime would not start with its flags, None when it would."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return f"{source}: cannot be read ({error})"
    return serve_flags.fault(layout.RUNTIMES / identity, text)


def clear(keep: int) -> None:
    """Delete the oldest runtimes and the kernels compiled for them, down to `keep` runtimes.

    Never the ones the links name, never what the engine still runs from, and nothing at all while
    a build is at work, which has an unfinished one there.
    """
    with (layout.RUNTIMES / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        runtime.give_back()
        serving = {runtime.link_target(link) for link in (layout.CURRENT, layout.PREVIOUS)}
        # What the engine runs from until it is restarted is in service too
        started = store.read_json_or(layout.STARTED_JSON, {}).get("inputs", {}).get("runtime", "")
        serving = (serving | {started.partition(":")[0]}) - {None, ""}
        spare = [path for path in layout.RUNTIMES.glob("[!.]*") if path.name not in serving]
        # One that was never finished goes first, whatever its age
        spare.sort(key=lambda path: ((path / runtime.MANIFEST).exists(), path.stat().st_mtime))
        for path in spare[: max(0, len(spare) - max(0, keep - len(serving)))]:
            shutil.rmtree(path, ignore_errors=True)
            for cache in layout.CACHE.glob(f"{path.name}*"):
                shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
