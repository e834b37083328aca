"""Put a complete runtime in service, and clear away the oldest ones.

Only links move here; the running engine keeps the files it has open until it is restarted.
"""

import argparse
import shutil
import sys

from dsv4 import layout, runtime, store, tree


def main(argv: list[str]) -> int:
    """Point `current` at a runtime and `previous` at the one before."""
    parser = argparse.ArgumentParser(prog="dsv4 switch", description=__doc__)
    parser.add_argument("id")
    parser.add_argument("--keep", type=int, default=3, help="runtimes to keep, at least 2")
    options = parser.parse_args(argv)
    found = runtime.examine(layout.RUNTIMES / options.id)
    if not found["complete"]:
        why = "; ".join(found["drift"]) or "it has no manifest"
        sys.stderr.write(f"dsv4 switch: runtime {options.id} is not complete: {why}\n")
        return 1
    before = runtime.link_target(layout.CURRENT)
    if before != options.id:
        if before is not None:
            tree.link_to(layout.PREVIOUS, f"runtimes/{before}")
        tree.link_to(layout.CURRENT, f"runtimes/{options.id}")
    links = (layout.CURRENT, layout.PREVIOUS)
    # What the engine runs from until it is restarted is in service too
    started = store.read_json_or(layout.STARTED_JSON, {}).get("inputs", {}).get("runtime", "")
    serving = {runtime.link_target(link) for link in links} | {started.partition(":")[0]}
    serving -= {None, ""}
    spare = [path for path in layout.RUNTIMES.glob("[!.]*") if path.name not in serving]
    spare.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in spare[max(0, options.keep - len(serving)) :]:
        shutil.rmtree(path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
