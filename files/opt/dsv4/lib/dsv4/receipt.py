"""Leave one JSON a change: what was deployed, from which revision, on what kernel and driver.

A receipt is due when what is deployed differs from what the last one says, not when this run did
the changing: a run cut off before its receipt must not leave a machine without one.
"""

import argparse
import json
import sys
import time

from dsv4 import layout, store


def main(argv: list[str]) -> int:
    """Write the object on stdin as a receipt of the given kind."""
    parser = argparse.ArgumentParser(prog="dsv4 receipt", description=__doc__)
    parser.add_argument("kind", choices=("deploy", "verify", "bench"))
    options = parser.parse_args(argv)
    try:
        body = json.load(sys.stdin)
    except ValueError as error:
        sys.stderr.write(f"dsv4 receipt: stdin holds no JSON: {error}\n")
        return 2
    now = time.time()
    name = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    layout.RECEIPTS.mkdir(parents=True, exist_ok=True)
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    path = layout.RECEIPTS / f"{name}-{options.kind}.json"
    store.write_json(path, {**body, "kind": options.kind, "written": written})
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
