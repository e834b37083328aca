"""The output projection for weights that are BF16, as the pack stores them."""

import torch
from torch import nn

# dsv4: from here on this is injected


def _bf16_o_proj(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    wo_a: nn.Module,
    wo_b: nn.Module,
    *,
    n_groups: int,
    rope_dim: int,
    o_lora_rank: int,
) -> torch.Tensor:
    """O projection without FP8: inverse RoPE, grouped wo_a, wo_b.

    A wo_a that was loaded as BF16 has no block scales, which the FP8 path reads.
    """
    # The kernel is plain Triton, whatever the name of its module says. It is imported late
    # because that module is loaded for ROCm only, and this one for every FP8 model too.
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import (
        _fused_inverse_rope_gptj,
    )

    rotated = _fused_inverse_rope_gptj(o, positions, cos_sin_cache, rope_dim)
    z = _grouped_projection(rotated, wo_a.weight, n_groups, o_lora_rank)
    return wo_b(z.flatten(1))


def _grouped_projection(
    rotated: torch.Tensor, weight: torch.Tensor, n_groups: int, o_lora_rank: int
) -> torch.Tensor:
    """Multiply each group of heads by its own rows of wo_a: [T, H, D] to [T, groups, rank].

    One batched product over the groups. It writes through a transposed view, so that neither
    the input nor the result is copied to change its layout.
    """
    tokens = rotated.shape[0]
    heads_by_group = rotated.view(tokens, n_groups, weight.shape[1])
    rows_by_group = weight.view(n_groups, o_lora_rank, weight.shape[1])
    z = rotated.new_empty((tokens, n_groups, o_lora_rank))
    torch.bmm(
        heads_by_group.transpose(0, 1),
        rows_by_group.transpose(1, 2),
        out=z.transpose(0, 1),
    )
    return z
