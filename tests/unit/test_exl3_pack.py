"""The synthetic pack is laid out like the real one, and is what our checks take for right."""

import json
from pathlib import Path

import pytest

from dsv4 import exl3, pack_config, pack_heads, pack_verify
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


def test_its_configuration_says_what_its_tensors_are() -> None:
    """At full size: each number that a shape shows is the shape's, and no key is left out."""
    scale = exl3_pack.Scale()
    made, config = dict(exl3_pack.tensors(scale)), exl3_pack.config(scale)
    vocab, hidden = made["embed.weight"][1]
    assert (config["vocab_size"], config["hidden_size"]) == (vocab, hidden)
    assert (
        len({name.split(".")[1] for name in made if name.startswith("layers.")})
        == (config["num_hidden_layers"])
    )
    drafts = {name.split(".")[1] for name in made if name.startswith("mtp.")}
    assert len(drafts) == config["num_nextn_predict_layers"] == 3
    assert len(config["compress_ratios"]) == config["num_hidden_layers"] + len(drafts)
    block, heads = "layers.2.attn", config["num_attention_heads"]
    assert made[f"{block}.wq_b.weight"][1] == (heads * config["head_dim"], config["q_lora_rank"])
    assert made[f"{block}.indexer.weights_proj.weight"][1][0] == config["index_n_heads"]
    assert made[f"{block}.indexer.compressor.norm.weight"][1] == (config["index_head_dim"],)
    assert made["hc_head_fn"][1] == (config["hc_mult"], config["hc_mult"] * hidden)
    markov = made[f"mtp.{len(drafts) - 1}.markov_head.markov_w1.weight"][1]
    assert markov == (vocab, config["dspark_markov_rank"])
    patch = config["vision_patch_size"]
    assert made["vision.patch_embed.proj.weight"][1] == (config["vision_dim"], 3 * patch * patch)
    down = config["vision_downsample_ratio"]
    assert made["aligner.w1.weight"][1][1] == down * down * config["vision_dim"]
    assert made["layers.0.ffn.gate.tid2eid"][1] == (vocab, config["num_experts_per_tok"])
    assert config["dspark_noise_token_id"] == 128_799
    assert config["qk_rope_head_dim"] == 64
    assert config["dspark_target_layer_ids"] == [40, 41, 42]


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (4, "num_nextn_predict_layers is 4, and the shards hold 3 draft layers"),
        (3, None),
        (1, None),
        (0, None),
        (None, None),
    ],
)
def test_a_draft_that_is_not_there_is_refused(
    pack: Path, tmp_path: Path, stated: int | None, words: str | None
) -> None:
    """The engine would serve layers that no shard fills."""
    for path in pack.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((pack / "config.json").read_text())
    config["num_nextn_predict_layers"] = stated
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    if words is None:
        pack_config.plan(tmp_path, "bf16_as_stored")
    else:
        with pytest.raises(pack_config.Refused, match=words):
            pack_config.plan(tmp_path, "bf16_as_stored")


def test_a_pack_without_its_draft_is_no_contradiction() -> None:
    assert list(exl3.Experts().contradictions({"num_nextn_predict_layers": 1}, "mcg")) == []


def test_a_draft_with_a_gap_or_of_another_length_is_found() -> None:
    """Before the bulk of it is fetched, by what the pack is known for."""
    made = {
        name: {"dtype": dtype, "shape": list(shape)}
        for name, (dtype, shape) in exl3_pack.tensors(exl3_pack.SMALL)
        if not name.startswith("mtp.1.")
    }
    config = exl3_pack.config(exl3_pack.SMALL)
    seen = exl3.Experts()
    seen.add(made.items())
    said = list(seen.contradictions(config, "mcg"))
    assert any("the draft has layers 0, 2" in line for line in said)
    small = {"config.json": json.dumps(config).encode()}
    for drafts, wrong in ((2, []), (None, []), (3, ["the draft has 2 layers, not 3"])):
        expected = pack_heads.Expected(layer_bits={3: 3, 5: 3}, bits=2, drafts=drafts)
        assert list(pack_heads.exl3_faults({"a": made}, small, expected)) == wrong


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
