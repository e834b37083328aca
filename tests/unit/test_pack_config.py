"""The view links a pack as it is, corrects an EXL3 configuration, and changes in one step."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsv4 import machine, pack_config, pack_verify
from dsv4.pack_config import Refused, exl3_config
from tests.lab import tiny_pack

BITS = {0: 2, 1: 3, 2: 2, 3: 3}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 4,
    "topk_method": "noaux_tc",
    "quantization_config": {"quant_method": "exl3", "bits": 2, "made_by": "its author"},
}


def with_block(**block: Any) -> dict[str, Any]:
    return {**CONFIG, "quantization_config": {"quant_method": "exl3", **block}}


def test_the_block_is_what_the_plugin_needs() -> None:
    out = exl3_config(CONFIG, {}, BITS, "bf16_as_stored")
    assert out["quantization_config"] == {
        "quant_method": "exl3",
        "bits": 2,
        "codebook": "mcg",
        "head_bits": 16,
        "non_routed_dtype_policy": "bf16_as_stored",
        "scope": "dsv4_routed_experts_only",
        "serving_reader_qualified": False,
        "version": "0.0.43",
        "layer_bits": {"1": 3, "3": 3},
        "mtp_experts": "source",
        "mtp_experts_start_layer": 4,
        "non_routed_quantization": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "made_by": "its author",
    }
    assert {k: v for k, v in out.items() if k != "quantization_config"} == {
        k: v for k, v in CONFIG.items() if k != "quantization_config"
    }


def test_a_corrected_configuration_is_left_alone() -> None:
    once = exl3_config(CONFIG, {}, BITS, "official_source_native")
    assert exl3_config(once, {}, BITS, "official_source_native") == once
    assert pack_config.encode(once) == pack_config.encode(json.loads(pack_config.encode(once)))


def test_the_policy_is_the_route_s() -> None:
    out = exl3_config(CONFIG, {}, BITS, "official_source_native")
    assert out["quantization_config"]["non_routed_dtype_policy"] == "official_source_native"


@pytest.mark.parametrize("method", ["EXL3", "Exl3"])
def test_the_method_s_name_is_written_as_the_engine_reads_it(method: str) -> None:
    out = exl3_config(with_block(quant_method=method, kept=1), {}, BITS, "bf16_as_stored")
    assert out["quantization_config"]["quant_method"] == "exl3"
    assert out["quantization_config"]["kept"] == 1


@pytest.mark.parametrize("bits", [None, 5, 16])
def test_the_head_is_sixteen_bits_whatever_was_there(bits: int | None) -> None:
    out = exl3_config(with_block(head_bits=bits), {}, BITS, "bf16_as_stored")
    assert out["quantization_config"]["head_bits"] == 16


def test_a_block_of_another_method_is_replaced() -> None:
    out = exl3_config(
        {**CONFIG, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
        {},
        BITS,
        "bf16_as_stored",
    )
    assert out["quantization_config"]["quant_method"] == "exl3"
    assert "fmt" not in out["quantization_config"]


def test_a_configuration_without_a_block_gets_one() -> None:
    bare = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    assert exl3_config(bare, {}, BITS, "bf16_as_stored")["quantization_config"]["bits"] == 2


def test_a_block_in_a_file_the_engine_ignores_is_taken_over() -> None:
    bare = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    elsewhere = {"quant_method": "exl3", "codebook": "mul1", "layer_bits": {"1": 3, "3": 3}}
    block = exl3_config(bare, elsewhere, BITS, "bf16_as_stored")["quantization_config"]
    assert block["codebook"] == "mul1"


def test_unknown_keys_of_the_nested_block_are_kept() -> None:
    nested = {"weight_block_size": (64, 64), "store_dtype": "mxfp4"}
    config = with_block(non_routed_quantization=nested)
    block = exl3_config(config, {}, BITS, "bf16_as_stored")["quantization_config"]
    assert block["non_routed_quantization"]["store_dtype"] == "mxfp4"
    assert block["non_routed_quantization"]["weight_block_size"] == [128, 128]


def test_only_an_empty_text_config_is_removed() -> None:
    assert "text_config" not in exl3_config(
        {**CONFIG, "text_config": {}}, {}, BITS, "bf16_as_stored"
    )
    full = {**CONFIG, "text_config": {"hidden_size": 1}}
    assert exl3_config(full, {}, BITS, "bf16_as_stored")["text_config"] == {"hidden_size": 1}


@pytest.mark.parametrize(
    ("config", "bits", "words"),
    [
        ({**CONFIG, "topk_method": None}, BITS, "topk_method must be noaux_tc"),
        ({**CONFIG, "num_hidden_layers": 5}, BITS, "num_hidden_layers is 5"),
        ({**CONFIG, "num_hidden_layers": "4"}, BITS, "num_hidden_layers"),
        (CONFIG, {0: 2, 3: 3}, r"layers \[1, 2\]"),
        (CONFIG, {}, "no shard holds EXL3 experts"),
        (with_block(layer_bits={"1": 2, "3": 3}), BITS, "layer 1: 2 in config.json, 3 in the"),
        (with_block(layer_bits={"1": 3, "3": 3, "9": 3}), BITS, "layer 9: 3 in config.json, none"),
        (with_block(layer_bits=[3, 3]), BITS, "layer_bits is"),
        (with_block(codebook="other"), BITS, "codebook must be"),
        ({**CONFIG, "quantization_config": "exl3"}, BITS, "holds str"),
    ],
)
def test_a_pack_that_contradicts_itself_is_refused(
    config: dict[str, Any], bits: dict[int, int], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        exl3_config(config, {}, bits, "bf16_as_stored")


def entry(width: int) -> dict[str, Any]:
    return {"dtype": "I16", "shape": [8, 8, width]}


def test_bits_come_from_trellis_widths() -> None:
    rows = [
        ("layers.0.ffn.experts.0.w1.trellis", entry(32)),
        ("layers.0.ffn.experts.1.w2.trellis", entry(32)),
        ("layers.1.ffn.experts.0.w3.trellis", entry(48)),
        ("layers.1.ffn.experts.0.w3.suh", {"dtype": "F16", "shape": [7]}),
        ("mtp.0.ffn.experts.0.w1.weight", {"dtype": "I8", "shape": [7]}),
    ]
    assert pack_config.layer_bits(rows) == {0: 2, 1: 3}


@pytest.mark.parametrize(
    ("second", "words"), [(48, "of 2 and of 3 bits"), (16, "none the plugin reads")]
)
def test_experts_of_one_layer_must_agree(second: int, words: str) -> None:
    rows = [
        ("layers.0.ffn.experts.0.w1.trellis", entry(32)),
        ("layers.0.ffn.experts.1.w1.trellis", entry(second)),
    ]
    with pytest.raises(Refused, match=words):
        pack_config.layer_bits(rows)


def test_a_configuration_is_read_strictly() -> None:
    assert pack_config.parse_config(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    for data, words in (
        (b'{"a": 1, "a": 2}', "has a twice"),
        (b"<html>", "is no JSON"),
        (b"[]", "holds list"),
        (b"\xff\xfe", "is not UTF-8"),
    ):
        with pytest.raises(Refused, match=words):
            pack_config.parse_config(data)


# On disk


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    root = tmp_path / "packs/tiny/rev"
    tiny_pack.write(root)
    return root


@pytest.fixture
def exl3(tmp_path: Path) -> Path:
    """A pack in miniature: real names, one expert a layer."""
    root = tmp_path / "packs/mixed/rev"
    root.mkdir(parents=True)
    placed = {}
    for layer, bits in BITS.items():
        name = f"model-{layer + 1:05d}-of-00004.safetensors"
        tensor = f"layers.{layer}.ffn.experts.0.w1.trellis"
        size = 2 * 16 * bits
        header = json.dumps(
            {tensor: {"dtype": "I16", "shape": [1, 1, 16 * bits], "data_offsets": [0, size]}}
        ).encode()
        (root / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        placed[tensor] = name
    (root / pack_verify.INDEX).write_text(json.dumps({"weight_map": placed}))
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "encoding").mkdir()
    (root / "encoding/notes.md").write_text("in a folder\n")
    return root


def listing(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return what must not change in a pack."""
    facts = {str(path): path.lstat() for path in [root, *root.rglob("*")]}
    return {path: (f.st_ino, f.st_size, f.st_mtime_ns) for path, f in facts.items()}


def run(root: Path, *more: str) -> int:
    return pack_config.main(["--pack-root", str(root), "--views", str(views(root)), *more])


def views(root: Path) -> Path:
    return root.parents[2] / "views"


def test_a_plain_pack_is_linked_as_it_is_and_not_written(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(plain)
    assert run(plain, "--check") == 1
    assert not views(plain).exists()
    assert run(plain, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    current = views(plain) / "current"
    assert (first["changed"], first["own"]) == (True, [])
    assert current.readlink() == Path(first["id"])
    assert {path.name for path in current.iterdir()} == {path.name for path in plain.iterdir()}
    assert all(path.readlink() == plain / path.name for path in current.iterdir())
    assert run(plain, "--check") == 0
    shown = listing(views(plain))
    assert run(plain, "--json") == 0
    assert json.loads(capsys.readouterr().out)["changed"] is False
    assert listing(views(plain)) == shown
    assert listing(plain) == before


def test_an_exl3_pack_gets_our_configuration_in_the_view_only(exl3: Path) -> None:
    before = listing(exl3)
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    current = views(exl3) / "current"
    config = json.loads((current / "config.json").read_text())
    assert config["quantization_config"]["layer_bits"] == {"1": 3, "3": 3}
    assert not (current / "config.json").is_symlink()
    assert (current / "encoding/notes.md").read_text() == "in a folder\n"
    assert run(exl3, "--exl3-policy", "bf16_as_stored", "--check") == 0
    assert listing(exl3) == before


def test_another_policy_is_another_view_and_the_first_one_stays(exl3: Path) -> None:
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    first = (views(exl3) / "current").readlink()
    assert run(exl3, "--exl3-policy", "official_source_native", "--check") == 1
    assert run(exl3, "--exl3-policy", "official_source_native") == 0
    assert (views(exl3) / "current").readlink() != first
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    assert (views(exl3) / "current").readlink() == first


def test_a_view_that_was_tampered_with_is_made_again(exl3: Path) -> None:
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    current = views(exl3) / "current"
    good = (current / "config.json").read_bytes()
    (current / "config.json").write_text("{}")
    (current / "extra").write_text("x")
    assert run(exl3, "--exl3-policy", "bf16_as_stored", "--check") == 1
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    assert (current / "config.json").read_bytes() == good
    assert not (current / "extra").exists()
    assert {path.name for path in views(exl3).iterdir()} == {
        ".lock",
        "current",
        "current.json",
        os.fspath(current.readlink()),
    }


def test_a_served_view_says_what_it_was_made_from(exl3: Path) -> None:
    """The deploy compares that with what it wants, so no change is no work."""
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    wanted = pack_config.wanted(exl3, "bf16_as_stored")
    assert pack_config.served(views(exl3))["made_from"] == wanted
    assert wanted != pack_config.wanted(exl3, "official_source_native")


@pytest.mark.parametrize("damage", ["config", "link", "extra", "pack", "note"])
def test_a_damaged_view_was_made_from_nothing(exl3: Path, damage: str) -> None:
    """Whatever is no longer as it was made is made again by the next deploy."""
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    current = views(exl3) / "current"
    link = next(path for path in sorted(current.iterdir()) if path.is_symlink())
    match damage:
        case "config":
            (current / "config.json").write_text("{}")
        case "link":
            link.unlink()
        case "extra":
            (current / "extra").write_text("x")
        case "pack":
            (exl3 / "generation_config.json").write_text("{ }")
        case "note":
            (views(exl3) / "current.json").write_text("{")
    assert pack_config.served(views(exl3))["made_from"] == {}
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 0
    assert pack_config.served(views(exl3))["made_from"] != {}


def test_what_a_killed_builder_left_is_removed(plain: Path) -> None:
    (views(plain) / ".new-dead").mkdir(parents=True)
    assert run(plain) == 0
    assert not (views(plain) / ".new-dead").exists()


def test_a_view_is_named_by_content(plain: Path) -> None:
    first = pack_config.plan(plain, None).identity
    (plain / "README.md").write_text("changed\n")
    assert pack_config.plan(plain, None).identity != first


def test_a_record_of_hashes_names_the_view_without_reading_shards(plain: Path) -> None:
    name = "model-00001-of-00004.safetensors"
    row = {"size": 1, "sha256": "ab" * 32}
    assert pack_config.file_facts(plain, name, {name: row}).endswith(f"1\0{'ab' * 32}")
    assert pack_config.file_facts(plain, name, {}) == pack_config.file_facts(plain, name, {})


def test_blob_links_of_a_hub_cache_are_followed_not_resolved(tmp_path: Path) -> None:
    blobs, root = tmp_path / "packs/x/blobs", tmp_path / "packs/x/snapshot"
    tiny_pack.write(blobs)
    root.mkdir()
    for path in blobs.iterdir():
        (root / path.name).symlink_to(Path("../blobs") / path.name)
    assert run(root) == 0
    link = views(root) / "current/config.json"
    assert link.readlink() == root / "config.json"
    assert link.read_bytes() == (blobs / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("spoil", "more", "words"),
    [
        (lambda p: (p / "model.py").write_text(""), [], "holds program code (model.py)"),
        (lambda p: (p / "config.json").unlink(), [], "is missing"),
        (lambda p: (p / "config.json").write_text("<html>"), [], "is no JSON"),
        (
            lambda p: (p / "model-00002-of-00004.safetensors").unlink(),
            [],
            "is missing; fetch it again",
        ),
        (lambda p: (p / "extra").symlink_to("/nowhere"), [], "is a link to nothing"),
        (lambda p: None, ["--exl3-policy", "bf16_as_stored"], "no shard holds EXL3"),
        (
            lambda p: p.with_name("rev.json").write_text('{"complete": false}'),
            [],
            "its download is not complete",
        ),
    ],
)
def test_a_pack_that_cannot_be_served_is_refused(
    plain: Path, spoil: Any, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(plain)
    assert run(plain, *more) == 1
    assert words in capsys.readouterr().err
    assert not (views(plain) / "current").is_symlink()


@pytest.mark.parametrize(
    "name",
    [
        *("model.py", "model.PY", "model.Py", "model.pY", "x.pyc", "x.PYC", "x.pyo", "x.pyd"),
        *("x.pyw", "x.pyz", "x.so", "x.SO", "lib.so.6", "lib.So.1.2", "x.dll", "x.dylib"),
        *("x.cpython-312-aarch64-linux-gnu.so", "a.whl", "a.EGG"),
        *("odd\nname.py", "a.b.py", "deep/er/model.Py", "linked/model.PY"),
    ],
)
def test_program_files_are_refused_wherever_they_are(
    plain: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any case of letters; also what is served through a directory that is a link."""
    path = plain / name
    if name.startswith("linked/"):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (plain / "linked").symlink_to(elsewhere)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    assert run(plain) == 1
    assert "holds program code" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["py", "numpy", "x.python", "so.json", "x.pyy", "x.sox", "so.6"])
def test_names_that_only_look_like_it_are_fine(plain: Path, name: str) -> None:
    (plain / name).write_text("")
    assert run(plain) == 0


def test_a_directory_that_is_a_link_is_part_of_the_pack(plain: Path, tmp_path: Path) -> None:
    """As long as it does not lead back into itself."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "image.json").write_text("{}")
    (plain / "vision").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(plain)
    (plain / "self").symlink_to(".")
    assert run(plain) == 0
    assert (views(plain) / "current/vision/image.json").read_text() == "{}"
    names = machine.visible_files(plain)
    assert "vision/image.json" in names
    assert not [name for name in names if name.startswith("self/")]


def test_code_is_served_when_it_is_allowed_knowingly(plain: Path) -> None:
    (plain / "model.py").write_text("")
    assert run(plain, "--code", "other.py") == 1
    assert run(plain, "--code", "model.py") == 0
    assert (views(plain) / "current/model.py").is_symlink()


def test_an_exl3_pack_without_facts_is_refused(exl3: Path) -> None:
    assert run(exl3) == 1


def test_a_cut_shard_is_refused_by_name(exl3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (exl3 / "model-00003-of-00004.safetensors").write_bytes(b"<html>")
    assert run(exl3, "--exl3-policy", "bf16_as_stored") == 1
    words = capsys.readouterr().err
    assert "model-00003-of-00004.safetensors: is 6 bytes long; it is a web page" in words


def test_a_broken_record_is_told_apart(plain: Path) -> None:
    plain.with_name("rev.json").write_text("no json")
    assert run(plain) == 3
