"""Tools that run on the machine: standard library and psutil, Python 3.11 or later.

Each is `python -m dsv4.NAME` with `main(argv) -> int`. Data goes to stdout (`--json`: one object
with `ok`), words to stderr. Exit codes: 0 fine, 1 a finding or refusal, 2 usage, 3 could not tell.
"""
