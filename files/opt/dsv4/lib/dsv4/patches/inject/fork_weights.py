"""A vision pack for the archived fork: text only, dense weights made block-FP8 at load."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# dsv4: from here on this is injected


def _fork_weights(
    weights: Iterable[tuple[str, torch.Tensor]], config: Any, fp8: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out what this model has no place for, and quantise what it keeps as FP8.

    `fp8` names the parameters that are FP8. Copying BF16 into one without making its scales
    loads, and then every token is equally likely.
    """
    hash_layers = getattr(config, "num_hash_layers", 0) or 0
    for name, weight in weights:
        if not _is_fork_weight(name, hash_layers):
            continue
        plain = weight.dim() == 2 and weight.dtype in (torch.bfloat16, torch.float16)
        if plain and _fork_parameter(name) in fp8:
            quantised, scale = _block_fp8(weight)
            yield name, quantised
            yield f"{name}_scale_inv", scale
        else:
            yield name, weight


def _is_fork_weight(name: str, hash_layers: int) -> bool:
    """Tell whether the fork's text model uses a tensor of the pack."""
    if name.startswith(("vision.", "aligner.", "image_", "mtp.")):
        return False
    if name.endswith(".ffn.gate.bias_vl"):
        return False
    bias = re.fullmatch(r"layers\.(\d+)\.ffn\.gate\.bias", name)
    return bias is None or int(bias[1]) >= hash_layers


def _fork_parameter(name: str) -> str:
    """Return the parameter that a tensor of the pack lands in, which may be a fused one."""
    for part, whole in (
        (r"\.attn\.(?:wq_a|wkv)\.weight$", ".attn.fused_wqa_wkv.weight"),
        (r"\.compressor\.(?:wkv|wgate)\.weight$", ".compressor.fused_wkv_wgate.weight"),
        (r"\.shared_experts\.w[13]\.weight$", ".shared_experts.gate_up_proj.weight"),
        (r"\.shared_experts\.w2\.weight$", ".shared_experts.down_proj.weight"),
    ):
        name = re.sub(part, whole, name)
    return f"model.{name}"


def _block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight as E4M3 and one scale for each block of 128 by 128.

    448 is the largest E4M3 number; the floor keeps a block of zeros from dividing by zero.
    """
    rows, columns = weight.shape
    shape = (-(-rows // 128) * 128, -(-columns // 128) * 128)
    # Models are loaded with BF16 as torch's default
    padded = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448.0
    scaled = (blocks / scale[:, None, :, None]).clamp(-448.0, 448.0).view_as(padded)
    return scaled[:rows, :columns].to(torch.float8_e4m3fn), scale
