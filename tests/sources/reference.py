"""What the patched code has to compute, written the long way round in double precision.

Shapes and layouts are those of the model on one device: 64 heads of 512, of which the last 64 are
rotated; 8 groups of heads in the output projection.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

HEADS, HEAD, ROPE, GROUPS, RANK = 64, 512, 64, 8, 1024
NOPE = HEAD - ROPE


def cos_sin(positions: int, generator: torch.Generator) -> torch.Tensor:
    """Return a table of cosines and sines, [positions, 64] as cos | sin in FP32."""
    angles = torch.rand(positions, ROPE // 2, generator=generator, dtype=torch.float64) * 6.3
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def rotated(
    o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, sign: int
) -> torch.Tensor:
    """Turn the last 64 lanes by +1 or -1 times their angle, in neighbouring pairs; FP64."""
    out = o.double().clone()
    row = table[positions].double()
    cos, sin = row[:, None, : ROPE // 2], sign * row[:, None, ROPE // 2 :]
    even, odd = out[..., NOPE::2].clone(), out[..., NOPE + 1 :: 2].clone()
    out[..., NOPE::2] = even * cos - odd * sin
    out[..., NOPE + 1 :: 2] = even * sin + odd * cos
    return out


def projection(
    o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return wo_a of the de-rotated heads, [T, 8, 1024] in FP64."""
    heads = rotated(o, positions, table, -1).reshape(o.shape[0], GROUPS, HEADS // GROUPS * HEAD)
    return torch.einsum("tgd,grd->tgr", heads, weight.double().view(GROUPS, RANK, -1))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error of a whole tensor."""
    wanted = wanted.double()
    error = (found.double() - wanted).norm() / wanted.norm()
    return float(error) if wanted.numel() else 0.0


@dataclass
class Attention:
    """One prefill: a table of keys that are also the values, a window and compressed keys."""

    query: torch.Tensor  # [T, heads, D]
    keys: torch.Tensor  # [N, D]
    window: torch.Tensor  # [T, W] rows of keys, -1 beyond the length
    lengths: torch.Tensor  # [T]
    more: torch.Tensor  # [M, D]
    extra: torch.Tensor  # [T, K]
    extra_lengths: torch.Tensor  # [T]
    sinks: torch.Tensor | None  # [heads], natural logarithm
    scale: float

    def softmax(self) -> torch.Tensor:
        """Return one softmax over window, compressed keys and sink, in FP64."""
        values, there = gather(self.keys, self.window, self.lengths)
        more, also = gather(self.more, self.extra, self.extra_lengths)
        both = torch.cat((values, more), dim=1).double()
        known = torch.cat((there, also), dim=1)
        return attend(self.query.double(), both, known, self.sinks, self.scale)[0]


def gather(
    keys: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of each row, [T, K, D], and which of them count."""
    flat = keys.reshape(-1, keys.shape[-1])
    rows = indices.reshape(indices.shape[0], -1)
    there = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    if bool((rows[there] < 0).any()):
        raise ValueError("an index below zero within the length")
    return flat[rows.long().clamp(min=0)], there


def attend(
    query: torch.Tensor,
    values: torch.Tensor,
    there: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax-weighted values [T, heads, D] and log2 of the sums of exponentials.

    Without keys the output is zero, and the logarithm the sink's or -1e30, as from the kernel.
    """
    logits = scale * torch.einsum("thd,tkd->thk", query, values)
    logits = logits.masked_fill(~there[:, None, :], float("-inf"))
    if sinks is None:
        sinks = torch.full((query.shape[1],), float("-inf"), device=query.device)
    sink = sinks.to(query.dtype).expand(query.shape[0], -1)
    peak = torch.maximum(logits.amax(dim=-1), sink)
    safe = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = (logits - safe[..., None]).exp()
    total = weights.sum(dim=-1) + (sink - safe).exp()
    out = torch.einsum("thk,tkd->thd", weights, values)
    out = out / total.masked_fill(total == 0, 1.0)[..., None]
    lse = total.log2() + safe / math.log(2.0)
    return out, lse.masked_fill(total == 0, -1e30)


@dataclass
class Segment:
    """The kernel's own description of one set of keys, as FlashInfer has it."""

    indices: torch.Tensor
    lengths: torch.Tensor | None = None
    kv_cache: torch.Tensor | None = None


class Kernel:
    """FlashInfer's SM120 kernel: its limits, its results, in whatever precision it is given."""

    def __init__(self, precision: torch.dtype = torch.float64) -> None:
        self.precision = precision
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        *,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        sparse_mla_segments: list[Any],
        out: torch.Tensor | None,
        sm_scale: float,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        workspace_buffer: Any,
        kv_scale_format: str,
    ) -> Any:
        rows, _, heads, _ = query.shape
        main, *others = sparse_mla_segments
        self.calls.append(
            {
                "rows": rows,
                "width": main.indices.shape[-1],
                "extra": bool(others),
                "sinks": sinks is not None,
                "return_lse": return_lse,
            }
        )
        if rows > 64 and others and main.indices.shape[-1] != 128:
            raise RuntimeError(f"Unsupported prefill configuration: topk={main.indices.shape[-1]}")
        if main.kv_cache is not None or not main.indices.is_contiguous():
            raise RuntimeError("the first segment has no cache and dense rows")
        if main.indices.dtype != torch.int32 or main.lengths.dtype != torch.int32:
            raise RuntimeError("indices and lengths are int32")
        out = torch.empty_like(query) if out is None else out
        found_lse = query.new_empty(rows, heads) if lse is None else lse
        found = [gather(kv_cache, main.indices, main.lengths)]
        found += [gather(one.kv_cache, one.indices, one.lengths) for one in others]
        values = torch.cat([one for one, _ in found], dim=1).to(self.precision)
        there = torch.cat([one for _, one in found], dim=1)
        exact = query.squeeze(1).to(self.precision)
        part, log2 = attend(exact, values, there, sinks, sm_scale)
        out.squeeze(1).copy_(part)
        found_lse.copy_(log2)
        return (out, found_lse) if return_lse else out


def prefill(
    rows: int,
    seed: int,
    *,
    heads: int = 4,
    size: int = 64,
    width: int = 512,
    lengths: tuple[int, ...] = (0, 1, 127, 128, 129, 512),
    extras: tuple[int, ...] = (0, 3, 64),
    sinks: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Attention:
    """Return random inputs; lengths and numbers of compressed keys go round by row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, more = normal(700, size), normal(90, size)
    count = torch.tensor([lengths[row % len(lengths)] for row in range(rows)], dtype=torch.int32)
    # Another step than the lengths', so that each meets each
    third = torch.tensor(
        [extras[row // len(lengths) % len(extras)] for row in range(rows)], dtype=torch.int32
    )
    window = torch.stack(
        [torch.randperm(700, generator=generator)[:width] for _ in range(rows)]
    ).int()
    window[torch.arange(width)[None, :] >= count[:, None]] = -1
    extra = torch.stack([torch.randperm(90, generator=generator)[:64] for _ in range(rows)]).int()
    extra[torch.arange(64)[None, :] >= third[:, None]] = -1
    sink = None
    if sinks:
        sink = normal(heads).float()
        sink[0] = float("-inf")
    # Logits spread by three or so: slices then differ in weight by powers of two and more
    return Attention(
        query=(3.0 * normal(rows, heads, size)).to(dtype),
        keys=keys.to(dtype),
        window=window,
        lengths=count,
        more=more.to(dtype),
        extra=extra,
        extra_lengths=third,
        sinks=sink,
        scale=size**-0.5,
    )
