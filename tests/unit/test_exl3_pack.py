"""The synthetic pack is laid out like the real one, and is what our checks take for right."""

import json
from pathlib import Path

import pytest

from dsv4 import pack_config, pack_verify
from tests.lab import exl3_pack


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exl3") / "pack"
    exl3_pack.write(root, exl3_pack.SMALL, count=4)
    return root


def test_at_full_size_it_weighs_what_the_real_one_does() -> None:
    """The figures are the recipe author's; nothing of the generator was fitted to them."""
    made = dict(exl3_pack.tensors(exl3_pack.Scale()))
    sizes = {name: exl3_pack.size_of(tensor) for name, tensor in made.items()}
    experts = [name for name in sizes if ".ffn.experts." in name]
    assert sum(sizes[name] for name in experts if name.startswith("layers.")) == 74_494_116_864
    assert sum(sizes[name] for name in experts if name.startswith("mtp.")) == 10_267_656_192
    assert round(sum(sizes.values()) / 1e9, 2) == 101.44
    vision = [name for name in made if name.startswith(("vision.", "aligner.", "image_"))]
    assert len(vision) == 267
    assert sum(name.endswith("gate.bias_vl") for name in made) == 46


def test_the_small_one_is_whole(pack: Path) -> None:
    report = pack_verify.check_structure(pack)
    assert report.findings == []
    assert report.shards == 4
    assert report.tensors == len(dict(exl3_pack.tensors(exl3_pack.SMALL)))
    assert report.experts.bits == {0: 2, 1: 2, 2: 2, 3: 3, 4: 2, 5: 3}


def test_its_configuration_is_put_right_for_the_other_route(pack: Path) -> None:
    view = pack_config.plan(pack, "bf16_as_stored")
    config = json.loads(view.own["config.json"])
    assert "text_config" not in config
    assert config["quantization_config"]["layer_bits"] == {"3": 3, "5": 3}
    assert config["quantization_config"]["non_routed_dtype_policy"] == "bf16_as_stored"
    assert config["quantization_config"]["mtp_experts_start_layer"] == 6


def test_an_expert_of_another_number_of_bits_is_found(pack: Path, tmp_path: Path) -> None:
    """Sizes and index cannot tell: 48 lanes of 16 rows are as many bytes as 32 of 24."""
    for path in pack.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = "layers.3.ffn.experts.1.w1.trellis"
    placed, _ = pack_verify.read_index(tmp_path)
    shard = tmp_path / next(one for one, held in (placed or {}).items() if name in held)
    data = shard.read_bytes()
    before = f'"{name}":{{"dtype":"I16","shape":[16,8,48]'.encode()
    assert data.count(before) == 1
    shard.write_bytes(data.replace(before, before.replace(b"[16,8,48]", b"[24,8,32]")))
    (found,) = pack_verify.check_structure(tmp_path).findings
    assert found.file == shard.name
    assert "layer 3: has experts of 3 and of 2 bits" in found.fault
