"""Say what a pack's bytes are: by component and type, on disk and, on a GPU host, once loaded.

"It does not fit" needs a component to blame: a pack whose attention was quantised, a draft nobody
asked for, experts of the wrong number of bits. On disk the shard headers tell, in a second.
"""

import argparse
import json
import os
import pwd
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsv4 import (
    cgroup,
    guard,
    guarded,
    launch,
    layout,
    memory,
    memory_gate,
    pack_verify,
    runtime_proof,
    store,
    systemd,
    watchdog,
)
from dsv4.sizes import both_units

GB: Final = 10**9
GIB: Final = 1 << 30

PREFIX: Final = re.compile(r"^(?:language_model\.)?(?:model\.)?")
COMPONENTS: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"mtp\.\d+\..*\.experts\.", "draft experts"),
        (r"mtp\.", "draft"),
        (r"(vision|visual|vision_tower)\.", "vision"),
        (r"(aligner|multi_modal_projector)\.|image_", "vision"),
        (r".*\.shared_experts?\.", "shared experts"),
        (r".*\.experts\.", "routed experts"),
        (r".*\.(gate|router)\.(weight|bias|bias_vl|e_score_correction_bias|tid2eid)$", "router"),
        (r".*\.indexer\.", "attention indexer"),
        (r".*\.compressor\.", "attention compressor"),
        (r".*\.(attn|self_attn|attention)\.", "attention"),
        (r"(.*\.)?hc_", "stream mixing"),
        (r".*\.mlp\.|.*\.ffn\.", "feed forward"),
        (r"(embed|embed_tokens|wte)\.", "embedding"),
        (r"(lm_head|head)\.", "output head"),
        (r"(.*[._])?norm\d?\.|.*layernorm\.", "norms"),
    )
)
"""First match wins; names are those of the pack and, once loaded, of the engine's modules."""

OTHER: Final = "other"


def component(tensor: str) -> str:
    """Return which part of the model a tensor belongs to."""
    name = PREFIX.sub("", tensor)
    return next((part for pattern, part in COMPONENTS if pattern.match(name)), OTHER)


@dataclass(frozen=True)
class Row:
    """Tensors of one component and type; size in bytes."""

    component: str
    dtype: str
    tensors: int
    bytes: int


def count(tensors: Iterable[tuple[str, str, int]]) -> list[Row]:
    """Return the rows for tensors given as name, type and bytes, largest component first."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, dtype, size in tensors:
        key = (component(name), dtype)
        number, total = found.get(key, (0, 0))
        found[key] = (number + 1, total + size)
    rows = [Row(*key, *values) for key, values in found.items()]
    whole = by_component(rows)
    return sorted(rows, key=lambda row: (-whole[row.component], row.component, -row.bytes))


def by_component(rows: Iterable[Row]) -> dict[str, int]:
    """Return bytes by component."""
    total: dict[str, int] = {}
    for row in rows:
        total[row.component] = total.get(row.component, 0) + row.bytes
    return total


def on_disk(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield a pack's tensors; raises `BadShard` or `OSError` with the shard's name in front."""
    placed, faults = pack_verify.read_index(root)
    if faults:
        raise pack_verify.BadShard(str(faults[0]))
    shards = placed or [path.name for path in root.glob(f"*{pack_verify.SUFFIX}")]
    if not shards:
        raise pack_verify.BadShard(f"{root}: holds no {pack_verify.SUFFIX} file")
    for shard in sorted(shards):
        try:
            tensors, _ = pack_verify.read_header(root / shard)
            for name, entry in tensors.items():
                begin, end = entry["data_offsets"]
                yield name, str(entry["dtype"]), end - begin
        except (KeyError, TypeError, ValueError) as error:
            raise pack_verify.BadShard(f"{shard}: {error}") from error
        except OSError as error:
            raise pack_verify.BadShard(
                f"{shard}: {pack_verify.why_unreadable(root / shard, error)}"
            ) from error


def differences(rows: Iterable[Row], expected: Mapping[str, int]) -> list[str]:
    """Return which components are not of the size the pack is known for."""
    found = by_component(rows)
    return [
        f"{name}: {both_units(found.get(name, 0))}, where {both_units(size)} are expected"
        for name, size in expected.items()
        if found.get(name, 0) != size
    ]


def table(rows: list[Row], title: str) -> Iterator[str]:
    """Yield the lines of a table for people."""
    yield f"{title:<24} {'type':<10} {'tensors':>8} {'GB':>9} {'GiB':>9}"
    for row in rows:
        yield (
            f"{row.component:<24} {row.dtype:<10} {row.tensors:>8}"
            f" {row.bytes / GB:>9.3f} {row.bytes / GIB:>9.3f}"
        )
    total = sum(row.bytes for row in rows)
    number = sum(row.tensors for row in rows)
    yield f"{'total':<24} {'':<10} {number:>8} {total / GB:>9.3f} {total / GIB:>9.3f}"


def expectation(path: Path = layout.FETCH_JSON) -> tuple[str | None, dict[str, int]]:
    """Return which pack the deploy described, and the sizes of components it is known for."""
    spec = store.read_json_or(path, {})
    known = (spec.get("expected") or {}).get("components") or {}
    return spec.get("name"), {str(name): int(size) for name, size in known.items()}


UNVERIFIED: Final = "Loading to count was never run on a Spark: these figures are unverified there."


def refusal(config: guard.Guard, info: memory.MemInfo, active: str) -> str | None:
    """Return why the model must not be loaded now: what a start of the service is held to.

    + active: the service's `ActiveState`
    """
    if active not in {"inactive", "failed"}:
        return (
            f"{config.unit} is {active or 'in an unknown state'} and there is no memory for a"
            f" second copy; stop it (systemctl stop {config.unit}), count, and start it again"
        )
    need = memory_gate.need_of(config.memory, info.total)
    if need.met(info):
        return None
    have = memory.free_for_engine(info, config.memory.device)
    return (
        f"wanted {need.wanted:.1f} GiB free and {need.headroom:.1f} left available with the"
        f" engine's share of {need.utilisation:.2f} taken, have {have:.1f} and"
        f" {max(0.0, need.left(info.available)):.1f}; `dsv4 memory_gate` says who holds memory,"
        " `dsv4 cache_drop --mode always` gives back what the pack takes as page cache"
    )


def loaded(config: guard.Guard, meminfo: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return what the model holds once loaded, counted in the runtime; raises `RuntimeError`.

    Loads the model as a start would: as the service's user, held to the same memory, and ended at
    the watchdog's floors or when the service is started meanwhile.
    """
    if os.geteuid() != 0:
        raise RuntimeError(f"--loaded: run it as root, which goes on as {config.user}")
    try:
        account = pwd.getpwnam(config.user)
    except KeyError:
        raise RuntimeError(f"there is no user {config.user}; deploy first") from None
    active = systemd.show(config.unit, "ActiveState").get("ActiveState", "")
    if why := refusal(config, memory.read_meminfo(meminfo), active):
        raise RuntimeError(why)
    runtime = layout.CURRENT.resolve()
    python = runtime / "bin/python"
    if not python.exists():
        raise RuntimeError(f"{python}: there is no runtime to load the model with; deploy first")
    given = {"HOME": "/nonexistent", **runtime_proof.environment()}
    environment = launch.engine_environment(given, runtime, None)
    watchdog.lock_memory()
    handle = os.open(meminfo, os.O_RDONLY | os.O_CLOEXEC)
    source = watchdog.files(handle, watchdog.open_or_none("/proc/pressure/memory"))

    def started() -> str | None:
        groups = cgroup.directories(config.unit)
        return f"{config.unit} is being started" if cgroup.pids(groups) else None

    ended = guarded.run(
        [str(python), "-P", "-m", "dsv4.loaded", str(os.getpid())],
        environment={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        user=(account.pw_uid, account.pw_gid, os.getgrouplist(config.user, account.pw_gid)),
        watch=guarded.Watch(config.memory, source, time.monotonic()),
        forbidden=started,
    )
    if ended.killed:
        raise RuntimeError(f"the model was not loaded to its end: killed, {ended.killed}")
    return counted(ended)


def counted(ended: guarded.Ended) -> tuple[list[Row], dict[str, Any]]:
    """Return what `loaded` has printed as its last line; raises `RuntimeError`."""
    try:
        found = json.loads(ended.out.strip().rpartition("\n")[2])
        return count((name, dtype, size) for name, dtype, size in found.pop("tensors")), found
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RuntimeError(
            f"the model was not loaded (status {ended.status}); its last words are above"
        ) from None


def main(argv: list[str]) -> int:
    """Print the census of one pack."""
    parser = argparse.ArgumentParser(prog="dsv4 census", description=__doc__)
    parser.add_argument("--pack-root", type=Path, help="a pack's directory; the served one's")
    parser.add_argument(
        "--loaded",
        action="store_true",
        help="load the served model and count that too (root; the service must be stopped); never"
        " run on a Spark",
    )
    parser.add_argument("--guard", type=Path, default=layout.GUARD_JSON)
    parser.add_argument("--meminfo", type=Path, default=Path("/proc/meminfo"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    served = pack_verify.served_root()
    root = options.pack_root or served
    if root is None:
        sys.stderr.write("dsv4 census: no pack is served here; give one (--pack-root DIR)\n")
        return 3
    name, expected = expectation()
    if root != served and (name is None or name not in root.parts):
        expected = {}
    inside: tuple[list[Row], dict[str, Any]] | None = None
    try:
        rows = count(on_disk(root))
        if options.loaded:
            inside = loaded(guard.read(options.guard), options.meminfo)
    except (
        pack_verify.BadShard,
        guard.BrokenGuard,
        memory.BadMemInfo,
        RuntimeError,
        OSError,
    ) as error:
        sys.stderr.write(f"dsv4 census: {error}\n")
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        return 3
    differing = differences(rows, expected)
    if options.json:
        found: dict[str, Any] = {
            "ok": not differing,
            "pack_root": str(root),
            "disk": [vars(row) for row in rows],
            "components": by_component(rows),
            "bytes": sum(row.bytes for row in rows),
            "differs": differing,
        }
        if inside:
            found["loaded"] = {
                "note": UNVERIFIED,
                "rows": [vars(row) for row in inside[0]],
                **inside[1],
            }
        print(json.dumps(found))
    else:
        print("\n".join(table(rows, "on disk")))
        if inside:
            print(f"\n{UNVERIFIED}\n" + "\n".join(table(inside[0], "loaded")))
            print("\n".join(f"{key}: {value}" for key, value in inside[1].items()))
    for line in differing:
        sys.stderr.write(f"dsv4 census: {line}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
