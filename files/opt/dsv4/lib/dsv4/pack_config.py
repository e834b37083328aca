"""Build the served directory: links to the pristine pack, with our config.json where it needs one.

The engine picks its quantisation by config.json before any flag, and the hub's copy of an EXL3 pack
may describe another route: then the model balloons past the memory, or answers with empty text.
Editing the download would fight its verification, so the right file is put beside it. A view is
named by its content and never changes; `current` moves to the next one in a single rename.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from dsv4 import exl3, layout, pack_verify, readable, store, tree
from dsv4.machine import visible_files
from dsv4.pack_verify import (
    SUFFIX,
    state_path,
    why_unreadable,
)

CONFIG: Final = "config.json"
ELSEWHERE: Final = "quantization_config.json"

Policy = Literal["bf16_as_stored", "official_source_native"]

BASE_BITS: Final = 2
FIXED: Final[Mapping[str, Any]] = {
    "quant_method": "exl3",
    "head_bits": 16,
    "scope": "dsv4_routed_experts_only",
    "serving_reader_qualified": False,
    "mtp_experts": "source",
}
DELEGATE: Final[Mapping[str, Any]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
"""How what is no routed expert is stored, for the policy that serves it so."""

VERSION: Final = "0.0.43"
TOPK_METHOD: Final = "noaux_tc"


class Refused(ValueError):
    """The pack cannot be served as it is; the text says what is wrong and what to do."""


# The configuration, pure


def parse_config(data: bytes) -> dict[str, Any]:
    """Return a config.json, read strictly: a doubled key is one that somebody did not see."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            keys = [key for key, _ in pairs]
            doubled = sorted({key for key in keys if keys.count(key) > 1})
            raise Refused(f"{CONFIG}: has {', '.join(doubled)} twice; keep the right one")
        return value

    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=once)
    except RecursionError:
        raise Refused(f"{CONFIG}: is nested too deep to be one; fetch it again") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{CONFIG}: is not UTF-8 text ({error})") from error
    except Refused:
        raise
    except ValueError as error:
        raise Refused(f"{CONFIG}: is no JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise Refused(f"{CONFIG}: holds {type(value).__name__}, not an object; fetch it again")
    return value


def is_exl3(config: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> bool:
    """Return whether the pack itself says it is EXL3."""
    blocks = (config.get("quantization_config"), elsewhere)
    methods = [block.get("quant_method") for block in blocks if isinstance(block, Mapping)]
    return any(str(method).lower() == "exl3" for method in methods)


def layer_bits(tensors: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[int, int]:
    """Return bits by layer from the shapes in shard headers; experts of a layer must agree."""
    try:
        return exl3.layer_bits(tensors)
    except exl3.Mixed as error:
        raise Refused(str(error)) from error


def stated_bits(block: Mapping[str, Any]) -> dict[int, int]:
    """Return the layers a configuration names; a malformed one is refused, never guessed at."""
    stated = block.get("layer_bits") or {}
    try:
        found = {int(layer): int(bits) for layer, bits in stated.items()}
        if any(isinstance(bits, float) and not bits.is_integer() for bits in stated.values()):
            raise ValueError
        return found
    except (AttributeError, TypeError, ValueError):
        raise Refused(f"{CONFIG}: layer_bits is {stated!r}, not layers and bits") from None


def check_stated(block: Mapping[str, Any], found: Mapping[int, int]) -> None:
    """Refuse a configuration that contradicts the shards it came with."""
    stated = stated_bits(block)
    base = block.get("bits", BASE_BITS)
    base = int(base) if isinstance(base, str) and base.isdecimal() else base
    if not stated:
        if "bits" in block and base not in found.values():
            raise Refused(
                f"{CONFIG} says {base} bits, the shards hold {sorted(set(found.values()))}; it"
                " belongs to another pack, fetch both again"
            )
        return
    wrong = [
        f"layer {layer}: {stated.get(layer, base)} in {CONFIG}, {bits} in the shards"
        for layer, bits in sorted(found.items())
        if stated.get(layer, base) != bits
    ] + [
        f"layer {layer}: {bits} in {CONFIG}, none in the shards"
        for layer, bits in sorted(stated.items())
        if layer not in found
    ]
    if wrong:
        raise Refused(
            f"{CONFIG} and shards disagree on bits ({'; '.join(wrong[:4])}); verify the pack"
            " (dsv4 pack_verify --full), and report it to its author if its bytes are right"
        )


def exl3_config(
    config: Mapping[str, Any],
    elsewhere: Mapping[str, Any],
    found: Mapping[int, int],
    policy: Policy,
) -> dict[str, Any]:
    """Return the configuration the plugin needs, from the pack's own and from shard headers.

    Keys we do not know are kept, here and inside the quantisation block: the pack's author or a
    newer plugin may need them. `elsewhere` is quantization_config.json, which the engine ignores.
    """
    if not found:
        raise Refused("no shard holds EXL3 experts (layers.N.ffn.experts.E.wI.trellis)")
    if config.get("topk_method") != TOPK_METHOD:
        raise Refused(
            f"{CONFIG}: topk_method must be {TOPK_METHOD} (got {config.get('topk_method')!r});"
            " without it the engine drops every routing bias and answers nonsense"
        )
    own = config.get("quantization_config")
    if own is not None and not isinstance(own, Mapping):
        raise Refused(f"{CONFIG}: quantization_config holds {type(own).__name__}, not an object")
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers != max(found) + 1:
        raise Refused(
            f"{CONFIG}: num_hidden_layers is {layers!r}, the shards hold experts of"
            f" {max(found) + 1} layers"
        )
    if absent := sorted(set(range(layers)) - set(found)):
        raise Refused(f"layers {absent}: no shard holds their experts; fetch the pack again")
    # Of another method's block only what is not about its method may stay, and that cannot be told
    known = [dict(b) for b in (elsewhere, own or {}) if is_exl3({}, b)]
    block: dict[str, Any] = {key: value for part in known for key, value in part.items()}
    check_stated(block, found)
    codebook = block.get("codebook", exl3.CODEBOOKS[0])
    if codebook not in exl3.CODEBOOKS:
        raise Refused(
            f"{CONFIG}: codebook must be one of {', '.join(exl3.CODEBOOKS)} (got {codebook})"
        )
    base = min(found.values())
    delegate = block.get("non_routed_quantization")
    block |= FIXED
    block |= {
        "bits": base,
        "codebook": codebook,
        "non_routed_dtype_policy": policy,
        "version": block.get("version", VERSION),
        "layer_bits": {str(layer): bits for layer, bits in sorted(found.items()) if bits != base},
        "mtp_experts_start_layer": layers,
        "non_routed_quantization": {
            **(delegate if isinstance(delegate, Mapping) else {}),
            **DELEGATE,
        },
    }
    out = {key: value for key, value in config.items() if key != "quantization_config"}
    if out.get("text_config") == {}:
        # The engine would take the empty part for the language model's whole configuration
        del out["text_config"]
    return {**out, "quantization_config": block}


def encode(config: Mapping[str, Any]) -> bytes:
    """Return a configuration as bytes that are the same every time."""
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


# The pack on disk


@dataclass(frozen=True)
class View:
    """What a view shows: files of one pack by name, and the files that are ours."""

    pack_root: Path
    files: tuple[str, ...]
    facts: tuple[str, ...]
    own: Mapping[str, bytes]

    @property
    def identity(self) -> str:
        """Return the name that stands for exactly this content."""
        whole = hashlib.sha256(f"{self.pack_root}\0".encode())
        for line in self.facts:
            whole.update(f"{line}\0".encode())
        for name, data in sorted(self.own.items()):
            whole.update(f"{name}\0{store.sha256_bytes(data)}\0".encode())
        return whole.hexdigest()[:16]


def file_facts(root: Path, name: str, known: Mapping[str, Any]) -> str:
    """Return a line that tells a file's content apart, without reading a large one.

    The fetcher's record has the hub's hash. Without a record a shard is known by size and header,
    anything else by its bytes.
    """
    path = root / name
    recorded = known.get(name, {})
    if digest := recorded.get("sha256") or recorded.get("blob_sha1"):
        return f"{name}\0{recorded.get('size')}\0{digest}"
    size = path.stat().st_size
    with path.open("rb") as handle:
        head = handle.read(8)
        length = size if not name.endswith(SUFFIX) else int.from_bytes(head, "little")
        head += handle.read(min(length, size))
    return f"{name}\0{size}\0{store.sha256_bytes(head)}"


def plan(root: Path, policy: Policy | None, code: Collection[str] = ()) -> View:
    """Return the view a pack should be served through; raise `Refused` when it should not be.

    `code` names the program files that its owner knows of and wants to be there.
    """
    state = store.read_json(state_path(root))
    if state is not None and not state.get("complete"):
        raise Refused(f"{root}: its download is not complete; wait for dsv4-fetch")
    try:
        names = visible_files(root)
        raw = (root / CONFIG).read_bytes()
    except OSError as error:
        raise Refused(f"{root / CONFIG}: {why_unreadable(root / CONFIG, error)}") from error
    if found := pack_verify.program_code(names, code):
        raise Refused(
            f"{root}: holds program code ({pack_verify.names(found)}), which a model needs none of;"
            " use a pack without, or name each such file in pack_code"
        )
    if broken := [name for name in names if not (root / name).exists()]:
        raise Refused(f"{root}: {broken[0]} is a link to nothing; complete the pack")
    report = pack_verify.check_structure(root)
    if report.findings:
        more = len(report.findings) - 1
        also = f" (and {more} more: dsv4 pack_verify)" if more else ""
        raise Refused(f"{root}: {report.findings[0]}{also}; fetch it again, or mend the pack")
    config = parse_config(raw)
    elsewhere = {}
    if ELSEWHERE in names:
        elsewhere = parse_config((root / ELSEWHERE).read_bytes())
    own: dict[str, bytes] = {}
    if policy is not None:
        fixed = exl3_config(config, elsewhere, report.experts.bits, policy)
        codebook = fixed["quantization_config"]["codebook"]
        for contradiction in report.experts.contradictions(config, codebook):
            raise Refused(f"{CONFIG} and shards disagree: {contradiction}")
        if fixed != config:
            own[CONFIG] = encode(fixed)
    elif is_exl3(config, elsewhere):
        raise Refused(
            f"{CONFIG}: this is an EXL3 pack, and its entry has no EXL3 facts"
            f" (--exl3-policy {' or '.join(get_args(Policy))})"
        )
    known = (state or {}).get("files", {})
    linked = tuple(name for name in names if name not in own)
    facts = tuple(file_facts(root, name, known) for name in linked)
    return View(pack_root=root, files=linked, facts=facts, own=own)


MAKER: Final = store.sha256_bytes(
    b"".join(Path(file).read_bytes() for file in (__file__, exl3.__file__))
)[:12]
"""A hash of this code: another version may put another configuration into the view."""

# The view on disk


def matches(directory: Path, view: View) -> bool:
    """Return whether a directory shows exactly this view."""
    try:
        shown = set(visible_files(directory))
        return (
            shown == {*view.files, *view.own}
            and all(
                (directory / name).is_symlink()
                and (directory / name).readlink() == view.pack_root / name
                for name in view.files
            )
            and all((directory / name).read_bytes() == data for name, data in view.own.items())
        )
    except OSError:
        return False


def is_current(views: Path, view: View) -> bool:
    """Return whether the served directory is this view already."""
    link = views / layout.VIEW_CURRENT.name
    return (
        link.is_symlink()
        and link.readlink() == Path(view.identity)
        and matches(views / view.identity, view)
    )


def build(views: Path, view: View) -> None:
    """Put the view in its place, whole or not at all."""
    place = views / view.identity
    if matches(place, view):
        return
    made = Path(tempfile.mkdtemp(dir=views, prefix=".new-"))
    try:
        made.chmod(0o755)
        for name in view.files:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to(view.pack_root / name)
        for name, data in view.own.items():
            store.write_bytes(made / name, data)
        if place.exists():
            place.rename(Path(tempfile.mkdtemp(dir=views, prefix=".old-")) / "view")
        made.rename(place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    store.sync_directory(views)


def signature(root: Path) -> str:
    """Return a hash over names, sizes and times of a pack's files: whether to look again at all."""
    whole = hashlib.sha256()
    with contextlib.suppress(OSError):
        for name in visible_files(root):
            found = (root / name).stat()
            whole.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return whole.hexdigest()


def wanted(root: Path, policy: Policy | None, code: Collection[str] = ()) -> dict[str, Any]:
    """Return what a view is made from; the deploy compares this with what the served one was."""
    return {"pack_root": str(root), "policy": policy, "code": sorted(code), "maker": MAKER}


def note(views: Path, view: View, made_from: Mapping[str, Any], seen: str) -> None:
    """Write down what the served view was made from; `seen` is the pack's signature before that."""
    own = {name: store.sha256_bytes(data) for name, data in view.own.items()}
    known = {"id": view.identity, "made_from": made_from, "signature": seen, "own": own}
    path = views / layout.VIEW_NOTE.name
    before = store.read_json_or(path, {})
    if {name: before.get(name) for name in known} != known:
        store.write_json(path, known)


def served(views: Path = layout.VIEWS) -> dict[str, Any]:
    """Return the served view's ID and what it was made from, as long as it still shows that.

    Cheap enough for every deploy: no header is read, and a file that changed shows in its time.
    """
    link = views / layout.VIEW_CURRENT.name
    known = store.read_json_or(views / layout.VIEW_NOTE.name, {})
    identity = link.readlink().name if link.is_symlink() else None
    made_from = known.get("made_from") or {}
    root = made_from.get("pack_root")
    intact = (
        identity is not None
        and identity == known.get("id")
        and root is not None
        and isinstance(known.get("own"), dict)
        and signature(Path(root)) == known.get("signature")
        and visible_files(link) == visible_files(Path(root))
        and all(path.exists() for path in link.iterdir())
        and all(store.sha256_file(link / name) == digest for name, digest in known["own"].items())
    )
    return {"id": identity, "made_from": made_from if intact else {}}


def serve(views: Path, view: View) -> bool:
    """Have the view built and served; return whether anything changed."""
    views.mkdir(parents=True, exist_ok=True)
    with store.hold(views / layout.VIEWS_LOCK):
        for stale in (*views.glob(".new-*"), *views.glob(".old-*")):
            shutil.rmtree(stale, ignore_errors=True)
        if is_current(views, view):
            return False
        build(views, view)
        tree.link_to(views / layout.VIEW_CURRENT.name, view.identity)
        for stale in views.glob(".old-*"):
            shutil.rmtree(stale, ignore_errors=True)
    return True


def main(argv: list[str]) -> int:
    """Have one pack served through a view, or say whether it is."""
    parser = argparse.ArgumentParser(prog="dsv4 pack_config", description=__doc__)
    parser.add_argument("--pack-root", type=Path, required=True, help="directory of the pack")
    parser.add_argument("--views", type=Path, default=layout.VIEWS)
    parser.add_argument(
        "--exl3-policy", choices=get_args(Policy), help="how what is no routed expert is served"
    )
    parser.add_argument(
        "--code", action="append", default=[], metavar="FILE", help="a program file it may have"
    )
    parser.add_argument("--user", default=layout.USER, help="whoever has to be able to read it")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when it differs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    root = Path(os.path.abspath(options.pack_root))  # noqa: PTH100 - its links stay as given
    changed = False
    policy, code = options.exl3_policy, options.code
    try:
        seen = signature(root)
        view = plan(root, policy, code)
        if closed := readable.as_user(options.user, (root / name for name in view.files)):
            raise Refused(
                f"{root}: {options.user} cannot read it: {closed}; give it access (chmod o+rx, or"
                f" setfacl -m u:{options.user}:rx), or have the pack elsewhere"
            )
        if options.check:
            ok = is_current(options.views, view)
        else:
            changed, ok = serve(options.views, view), True
            note(options.views, view, wanted(root, policy, code), seen)
    except (Refused, store.BrokenState, OSError) as error:
        sys.stderr.write(f"dsv4 pack_config: {error}\n")
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        return 1 if isinstance(error, Refused) else 3
    if not ok:
        sys.stderr.write(
            f"dsv4 pack_config: {options.views / layout.VIEW_CURRENT.name} does not show {root};"
            " run it without --check\n"
        )
    if options.json:
        found = {
            "ok": ok,
            "changed": changed,
            "id": view.identity,
            "path": str(options.views / view.identity),
            "pack_root": str(root),
            "own": sorted(view.own),
        }
        print(json.dumps(found))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
