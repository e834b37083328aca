"""Every path, user and unit name on the target, once.

The deploy and the tools on the machine read this same file, so the two sides cannot disagree.
"""

from pathlib import Path
from typing import Final

SCHEMA: Final = 1

# Ours, root's: code and runtimes
ROOT: Final = Path("/opt/dsv4")
LIB: Final = ROOT / "lib"
TOOLS: Final = ROOT / "tools"
TOOLS_PYTHON: Final = TOOLS / "bin/python"
BIN: Final = ROOT / "bin"
DSV4: Final = BIN / "dsv4"
LOCKS: Final = ROOT / "locks"
RUNTIMES: Final = ROOT / "runtimes"
CURRENT: Final = ROOT / "current"
PREVIOUS: Final = ROOT / "previous"
WHEELS: Final = ROOT / "wheels"
SHARE: Final = ROOT / "share"
SCRAPE: Final = SHARE / "prometheus/dsv4.yml"
DASHBOARD: Final = SHARE / "grafana/dsv4.json"

# What the owner decided
ETC: Final = Path("/etc/dsv4")
SERVE_YAML: Final = ETC / "serve.yaml"
GUARD_JSON: Final = ETC / "guard.json"
ENVIRONMENT: Final = ETC / "environment"
FETCH_JSON: Final = ETC / "fetch.json"
BUILD_JSON: Final = ETC / "build.json"
CREDENTIALS: Final = ETC / "credentials"
API_KEY: Final = CREDENTIALS / "api_key"
HUB_TOKEN: Final = CREDENTIALS / "hub_token"
RECORD_JSON: Final = ETC / "record.json"

# What grows
VAR: Final = Path("/var/lib/dsv4")
PACKS: Final = VAR / "packs"
FETCH_WANTED: Final = PACKS / ".fetch-wanted"
FETCH_LOCK: Final = ".fetch.lock"
VIEWS_LOCK: Final = ".lock"
VIEWS: Final = VAR / "views"
VIEW_CURRENT: Final = VIEWS / "current"
VIEW_NOTE: Final = VIEWS / "current.json"
CACHE: Final = VAR / "cache"
WATCHDOG_RECORDS: Final = VAR / "watchdog"
METRICS: Final = VAR / "metrics"
METRICS_FILE: Final = METRICS / "dsv4.prom"
RECEIPTS: Final = VAR / "receipts"
LOADS_JSON: Final = VAR / "loads.json"
UV_CACHE: Final = Path("/var/cache/dsv4/uv")
LOGS: Final = Path("/var/log/dsv4")

# What a boot forgets
RUN: Final = Path("/run/dsv4")
STARTED_JSON: Final = RUN / "started.json"
PHASE_JSON: Final = RUN / "phase.json"
PHASES: Final = ("starting", "loading", "profiling", "ready", "stopping", "stopped", "failed")
RESTARTS_JSON: Final = RUN / "restarts.json"
REFUSED_JSON: Final = RUN / "refused.json"
FINGERPRINT_SALT: Final = RUN / "fingerprint.salt"
KEY_DIGEST: Final = RUN / "api_key.sha256"
DRAINING: Final = RUN / "draining"
FETCH_PROGRESS: Final = Path("/run/dsv4-fetch/fetch.json")
"""In a directory of its own: the fetcher's user may not write beside the hooks' files."""
BUILD_PROGRESS: Final = RUN / "build.json"
BENCH_PROGRESS: Final = RUN / "bench.json"
BENCH_LOCK: Final = RUN / "bench.lock"
VERIFIED_JSON: Final = RUN / "verified.json"
RUNTIME_VERIFIED_JSON: Final = RUN / "runtime-verified.json"
LOCK: Final = RUN / "deploy.lock"
WORK_LOCK: Final = Path("/run/dsv4-work.lock")
"""Held by whatever changes this machine for the deploy, for as long as that one command runs."""

PROFILE: Final = Path("/etc/profile.d/dsv4-cuda.sh")
TMPFILES: Final = Path("/etc/tmpfiles.d/dsv4.conf")
NEEDRESTART: Final = Path("/etc/needrestart/conf.d/dsv4.conf")
SYSTEMD: Final = Path("/etc/systemd/system")
UNIT: Final = "dsv4.service"
UNIT_WATCHDOG: Final = "dsv4-watchdog.service"
UNIT_UNGUARDED: Final = "dsv4-unguarded.service"
UNIT_READAHEAD: Final = "dsv4-readahead.service"
UNIT_LIVENESS: Final = "dsv4-liveness.service"
UNIT_FETCH: Final = "dsv4-fetch.service"
UNIT_BUILD: Final = "dsv4-build.service"
UNIT_BENCH: Final = "dsv4-bench.service"
"""Transient: systemd forgets it when it is done, and no file of it is left."""
UNITS: Final = (
    UNIT,
    UNIT_WATCHDOG,
    UNIT_UNGUARDED,
    UNIT_READAHEAD,
    UNIT_LIVENESS,
    UNIT_FETCH,
    UNIT_BUILD,
)

GIVEN: Final = Path("/run/credentials") / UNIT
"""Where systemd lays what the engine's unit is given as credentials."""
TLS_CERT: Final = GIVEN / "tls_cert"
TLS_KEY: Final = GIVEN / "tls_key"

USER: Final = "dsv4"
USER_FETCH: Final = "dsv4-fetch"

MOUNTS: Final = (ROOT, VAR, UV_CACHE, Path("/tmp"))  # noqa: S108 - asked for its space only
"""Where bytes of ours land: the mounts preflight looks at."""
