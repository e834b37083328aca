"""Make packs laid out like the real one: its names, types, shapes, mix of bits, shards and index.

Scaled down it is a few megabytes of real bytes, for what reads packs; nothing can serve it. At full
size only the headers are written: 48 sparse files of the true lengths, for speed. The shapes are
those of the vision model's sources and of the EXL3 format; what no source says of the draft
(`markov_w2`) is marked below.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsv4 import pack_verify

SHARDS: Final = 48
MCG: Final = (-877912083).to_bytes(4, "little", signed=True)

Tensor = tuple[str, tuple[int, ...]]
"""A tensor's type and shape, as a header has them."""


@dataclass(frozen=True)
class Scale:
    """How large a model is made; the defaults are the real one's."""

    hidden: int = 4096
    inter: int = 2048
    vocab: int = 129_280
    layers: int = 43
    experts: int = 256
    per_token: int = 6
    hash_layers: int = 3
    heads: int = 64
    head_dim: int = 512
    q_lora: int = 1024
    o_lora: int = 1024
    o_groups: int = 8
    index_heads: int = 64
    index_dim: int = 128
    hc: int = 4
    drafts: int = 3
    markov: int = 256
    vision_layers: int = 32
    vision_dim: int = 1024
    vision_inter: int = 2816
    bits: int = 2
    layer_bits: Mapping[int, int] = field(
        default_factory=lambda: dict.fromkeys((3, 13, 21, 22, 28, 41), 3)
    )

    @property
    def compress_ratios(self) -> list[int]:
        """One a layer, drafts included: none, none, then 4 and 128 in turn."""
        return [
            *(0 if layer < 2 else (4, 128)[layer % 2] for layer in range(self.layers)),
            *([0] * self.drafts),
        ]


SMALL: Final = Scale(
    hidden=256,
    inter=128,
    vocab=512,
    layers=6,
    experts=4,
    per_token=2,
    heads=4,
    head_dim=64,
    q_lora=64,
    o_lora=64,
    o_groups=2,
    index_heads=4,
    index_dim=32,
    markov=16,
    vision_layers=2,
    vision_dim=64,
    vision_inter=96,
    layer_bits={3: 3, 5: 3},
)
"""Small, with every kind of tensor; EXL3 wants the sizes to be multiples of 128."""


def experts(scale: Scale, layer: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's routed experts in EXL3: trellis, two scales, the codebook's multiplier."""
    hidden, inter = scale.hidden, scale.inter
    width = 16 * scale.layer_bits.get(layer, scale.bits)
    for expert in range(scale.experts):
        for name, (rows, columns) in {
            "w1": (hidden, inter),
            "w2": (inter, hidden),
            "w3": (hidden, inter),
        }.items():
            base = f"layers.{layer}.ffn.experts.{expert}.{name}"
            yield f"{base}.trellis", ("I16", (rows // 16, columns // 16, width))
            yield f"{base}.suh", ("F16", (rows,))
            yield f"{base}.svh", ("F16", (columns,))
            yield f"{base}.mcg", ("I32", ())


def block(scale: Scale, base: str, ratio: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what a decoder block has beside its routed experts."""
    hidden, dim, hc = scale.hidden, scale.head_dim, scale.hc
    group = scale.heads * dim // scale.o_groups

    def bf16(name: str, *shape: int) -> tuple[str, Tensor]:
        return f"{base}.{name}", ("BF16", shape)

    def f32(name: str, *shape: int) -> tuple[str, Tensor]:
        return f"{base}.{name}", ("F32", shape)

    yield bf16("attn_norm.weight", hidden)
    yield bf16("ffn_norm.weight", hidden)
    yield bf16("attn.wq_a.weight", scale.q_lora, hidden)
    yield bf16("attn.q_norm.weight", scale.q_lora)
    yield bf16("attn.wq_b.weight", scale.heads * dim, scale.q_lora)
    yield bf16("attn.wkv.weight", dim, hidden)
    yield bf16("attn.kv_norm.weight", dim)
    yield bf16("attn.wo_a.weight", scale.o_groups * scale.o_lora, group)
    yield bf16("attn.wo_b.weight", hidden, scale.o_groups * scale.o_lora)
    yield f32("attn.attn_sink", scale.heads)
    if ratio > 1:
        width = 2 * dim if ratio == 4 else dim
        yield bf16("attn.compressor.wkv.weight", width, hidden)
        yield bf16("attn.compressor.wgate.weight", width, hidden)
        yield bf16("attn.compressor.norm.weight", dim)
        yield f32("attn.compressor.ape", ratio, width)
    if ratio == 4:
        index = 2 * scale.index_dim
        yield bf16("attn.indexer.wq_b.weight", scale.index_heads * scale.index_dim, scale.q_lora)
        yield bf16("attn.indexer.weights_proj.weight", scale.index_heads, hidden)
        yield bf16("attn.indexer.compressor.wkv.weight", index, hidden)
        yield bf16("attn.indexer.compressor.wgate.weight", index, hidden)
        yield bf16("attn.indexer.compressor.norm.weight", scale.index_dim)
        yield f32("attn.indexer.compressor.ape", ratio, index)
    mixes = hc * (hc + 2)
    for part in ("hc_attn", "hc_ffn"):
        yield f32(f"{part}_fn", mixes, hc * hidden)
        yield f32(f"{part}_base", mixes)
        yield f32(f"{part}_scale", 3)
    yield bf16("ffn.gate.weight", scale.experts, hidden)
    yield f32("ffn.gate.bias", scale.experts)
    yield f32("ffn.gate.bias_vl", scale.experts)
    yield bf16("ffn.shared_experts.w1.weight", scale.inter, hidden)
    yield bf16("ffn.shared_experts.w2.weight", hidden, scale.inter)
    yield bf16("ffn.shared_experts.w3.weight", scale.inter, hidden)


def head(scale: Scale, base: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the mixing of the streams in front of an output head."""
    yield f"{base}norm.weight", ("BF16", (scale.hidden,))
    yield f"{base}hc_head_fn", ("F32", (scale.hc, scale.hc * scale.hidden))
    yield f"{base}hc_head_base", ("F32", (scale.hc,))
    yield f"{base}hc_head_scale", ("F32", (1,))


def draft(scale: Scale, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield one stage of the draft inside the pack; its experts are as the source has them."""
    base, hidden, inter = f"mtp.{stage}", scale.hidden, scale.inter
    yield from block(scale, base, 0)
    for expert in range(scale.experts):
        for name, (rows, columns) in {
            "w1": (inter, hidden),
            "w2": (hidden, inter),
            "w3": (inter, hidden),
        }.items():
            # Two 4-bit numbers a byte, one scale for 32 of them
            yield f"{base}.ffn.experts.{expert}.{name}.weight", ("I8", (rows, columns // 2))
            yield f"{base}.ffn.experts.{expert}.{name}.scale", ("F8_E8M0", (rows, columns // 32))
    if stage == 0:
        yield f"{base}.main_proj.weight", ("BF16", (hidden, scale.drafts * hidden))
        yield f"{base}.main_norm.weight", ("BF16", (hidden,))
    if stage == scale.drafts - 1:
        yield from head(scale, f"{base}.")
        yield f"{base}.markov_head.markov_w1.weight", ("BF16", (scale.vocab, scale.markov))
        # Of this one no source says the shape
        yield f"{base}.markov_head.markov_w2.weight", ("BF16", (scale.vocab, scale.markov))
        yield f"{base}.confidence_head.proj.weight", ("BF16", (1, hidden + scale.markov))


def vision(scale: Scale) -> Iterator[tuple[str, Tensor]]:
    """Yield the vision tower, the aligner and the four learned vectors."""
    dim, inter, hidden = scale.vision_dim, scale.vision_inter, scale.hidden

    def bf16(name: str, *shape: int) -> tuple[str, Tensor]:
        return name, ("BF16", shape)

    yield bf16("vision.patch_embed.proj.weight", dim, 3 * 14 * 14)
    yield bf16("vision.patch_embed.proj.bias", dim)
    for layer in range(scale.vision_layers):
        base = f"vision.blocks.{layer}"
        yield bf16(f"{base}.norm1.weight", dim)
        yield bf16(f"{base}.attn.wqkv.weight", 3 * dim, dim)
        yield bf16(f"{base}.attn.wqkv.bias", 3 * dim)
        yield bf16(f"{base}.attn.wo.weight", dim, dim)
        yield bf16(f"{base}.attn.wo.bias", dim)
        yield bf16(f"{base}.norm2.weight", dim)
        yield bf16(f"{base}.mlp.w1.weight", 2 * inter, dim)
        yield bf16(f"{base}.mlp.w2.weight", dim, inter)
    yield bf16("vision.norm.weight", dim)
    yield bf16("aligner.w1.weight", hidden, 9 * dim)
    yield bf16("aligner.w1.bias", hidden)
    yield bf16("aligner.w2.weight", hidden, hidden)
    yield bf16("aligner.w2.bias", hidden)
    for name in ("image_start", "image_end", "image_newline", "image_pad"):
        yield bf16(name, hidden)


def tensors(scale: Scale) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model, in the order it is read."""
    yield "embed.weight", ("BF16", (scale.vocab, scale.hidden))
    for layer in range(scale.layers):
        yield from block(scale, f"layers.{layer}", scale.compress_ratios[layer])
        if layer < scale.hash_layers:
            yield f"layers.{layer}.ffn.gate.tid2eid", ("I64", (scale.vocab, scale.per_token))
        yield from experts(scale, layer)
    yield from head(scale, "")
    yield "head.weight", ("BF16", (scale.vocab, scale.hidden))
    for stage in range(scale.drafts):
        yield from draft(scale, stage)
    yield from vision(scale)


def config(scale: Scale) -> dict[str, Any]:
    """Return the pack's configuration as the Hub has it: the other route's, which we correct."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": scale.hidden,
        "moe_intermediate_size": scale.inter,
        "num_hidden_layers": scale.layers,
        "num_hash_layers": scale.hash_layers,
        "n_routed_experts": scale.experts,
        "num_experts_per_tok": scale.per_token,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "num_attention_heads": scale.heads,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": scale.head_dim // 8,
        "index_n_heads": scale.index_heads,
        "index_head_dim": scale.index_dim,
        "index_topk": 512,
        "sliding_window": 128,
        "max_position_embeddings": 1_048_576,
        "rope_theta": 10_000,
        "compress_rope_theta": 160_000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65_536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "rms_norm_eps": 1e-20,
        "hc_mult": scale.hc,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dspark_block_size": 5,
        "dspark_markov_rank": scale.markov,
        "dspark_noise_token_id": scale.vocab - 481,
        "dspark_target_layer_ids": list(range(scale.layers - scale.drafts, scale.layers)),
        "head_dim": scale.head_dim,
        "q_lora_rank": scale.q_lora,
        "o_lora_rank": scale.o_lora,
        "o_groups": scale.o_groups,
        "compress_ratios": scale.compress_ratios,
        "num_nextn_predict_layers": scale.drafts,
        "vocab_size": scale.vocab,
        "vision_n_layers": scale.vision_layers,
        "vision_dim": scale.vision_dim,
        "vision_inter_dim": scale.vision_inter,
        "vision_n_heads": 16,
        "vision_patch_size": 14,
        "vision_rope_theta": 10_000.0,
        "vision_downsample_ratio": 3,
        "vision_max_n_token": 384,
        "vision_min_pixels": 147_456,
        "vision_max_wh_ratio": 8,
        "topk_method": "noaux_tc",
        "expert_dtype": "fp4",
        "text_config": {},
        "quantization_config": {
            "quant_method": "exl3",
            "bits": scale.bits,
            "layer_bits": {str(layer): bits for layer, bits in scale.layer_bits.items()},
            "non_routed_dtype_policy": "official_source_native",
        },
    }


def shards(scale: Scale, count: int) -> list[dict[str, Tensor]]:
    """Return the tensors dealt to shards of about the same size, in their order."""
    sizes = [(name, one, size_of(one)) for name, one in tensors(scale)]
    share = sum(size for _, _, size in sizes) / count
    dealt: list[dict[str, Tensor]] = [{} for _ in range(count)]
    reached = 0
    for name, one, size in sizes:
        dealt[min(count - 1, int(reached / share))][name] = one
        reached += size
    return dealt


def size_of(tensor: Tensor) -> int:
    """Return a tensor's bytes."""
    size = pack_verify.tensor_bytes(*tensor)
    if size is None:
        raise ValueError(f"{tensor[0]}: not a type of the format")
    return size


def header(held: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Return a shard's beginning and the size of its data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name, (dtype, shape) in held.items():
        end = reached + size_of((dtype, shape))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [reached, end]}
        reached = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, reached


def content(name: str, tensor: Tensor) -> bytes:
    """Return a tensor's bytes: never the same for two names, always the same for one."""
    if name.endswith(".mcg"):
        return MCG
    return hashlib.shake_128(name.encode()).digest(size_of(tensor))


def write(root: Path, scale: Scale, *, count: int = SHARDS, headers_only: bool = False) -> int:
    """Write a pack and return the bytes of its tensors; sparse shards if asked."""
    root.mkdir(parents=True, exist_ok=True)
    placed: dict[str, str] = {}
    total = 0
    for number, held in enumerate(shards(scale, count), 1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        begin, data = header(held)
        with (root / name).open("wb") as file:
            file.write(begin)
            if headers_only:
                os.truncate(file.fileno(), len(begin) + data)
            else:
                file.writelines(content(*one) for one in held.items())
        total += data
        placed |= dict.fromkeys(held, name)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (root / pack_verify.INDEX).write_text(json.dumps(index, indent=2))
    for name, value in {
        "config.json": config(scale),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {"model_max_length": 1_048_576},
        "tokenizer.json": {"version": "1.0"},
    }.items():
        (root / name).write_text(json.dumps(value, indent=2))
    return total


def main(argv: list[str]) -> int:
    """Write one pack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--full-size", action="store_true", help="headers only, sparse")
    options = parser.parse_args(argv)
    if options.full_size:
        total = write(options.root, Scale(), headers_only=True)
    else:
        total = write(options.root, SMALL, count=4)
    print(json.dumps({"root": str(options.root), "bytes": total}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
