"""Sliding windows wider than the SM120 kernel takes, as several launches that are merged."""

from collections.abc import Callable
from typing import Any

import torch

# dsv4: from here on this is injected


def _sparse_mla_in_slices(
    run: Callable[..., Any],
    segment: Callable[..., Any],
    *,
    query: torch.Tensor,
    sparse_mla_segments: list[Any],
    out: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: None,
    return_lse: bool,
    **same: Any,
) -> torch.Tensor:
    """Call the SM120 kernel, in slices of 128 keys where it cannot take the window whole.

    With a second (compressed) cache and more than 64 rows, its prefill is built for windows of
    128 only, while a prompt with an image has windows of 512. Every other call goes straight
    through. Rows are taken some hundred at a time, because the merge keeps them in FP32, which
    for 8192 rows of 64 heads is 1 GiB. The blocks are even, so that none of a long batch is short
    enough to fall to the decode kernel.
    """
    main, rows = sparse_mla_segments[0], query.shape[0] * query.shape[1]
    width = main.indices.shape[-1]
    if rows <= 64 or len(sparse_mla_segments) == 1 or width <= 128:
        return run(
            query=query,
            sparse_mla_segments=sparse_mla_segments,
            out=out,
            sinks=sinks,
            lse=lse,
            return_lse=return_lse,
            **same,
        )
    if width % 128 or query.shape[1] != 1 or main.lengths is None or return_lse:
        raise ValueError(
            "a sliding window in slices wants a width that is a multiple of 128, one query a "
            f"row, lengths and no log-sum-exp; got indices {tuple(main.indices.shape)}, query "
            f"{tuple(query.shape)}, lengths {main.lengths is not None}, {return_lse=}"
        )
    result = torch.empty_like(query) if out is None else out
    blocks = -(-rows // 256)
    for number in range(blocks):
        some = slice(rows * number // blocks, rows * (number + 1) // blocks)
        _merge_slices(
            run,
            segment,
            query=query[some],
            segments=[
                segment(
                    indices=one.indices[some],
                    lengths=one.lengths.reshape(rows)[some],
                    kv_cache=one.kv_cache,
                )
                for one in sparse_mla_segments
            ],
            out=result[some],
            sinks=sinks,
            **same,
        )
    return result


def _merge_slices(
    run: Callable[..., Any],
    segment: Callable[..., Any],
    *,
    query: torch.Tensor,
    segments: list[Any],
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    **same: Any,
) -> None:
    """Attend to 128 keys of the window at a time and merge; writes `out`.

    The compressed keys and the sink belong to the softmax once: they go with the first slice.
    """
    main, extra = segments
    rows, _, heads, _ = query.shape
    part = torch.empty_like(out)
    part_lse = torch.empty((rows, heads), dtype=torch.float32, device=query.device)
    total = torch.zeros(out.shape, dtype=torch.float32, device=query.device).squeeze(1)
    weight = torch.zeros_like(part_lse)
    # What the kernel itself gives for a row without keys
    peak = torch.full_like(part_lse, -1e30)
    for start in range(0, main.indices.shape[-1], 128):
        lengths = (main.lengths - start).clamp(0, 128)
        live = lengths > 0
        some = [
            segment(indices=main.indices[..., start : start + 128].contiguous(), lengths=lengths)
        ]
        if start == 0:
            some.append(extra)
            live = live | (extra.lengths > 0)
        run(
            query=query,
            sparse_mla_segments=some,
            out=part,
            sinks=sinks if start == 0 else None,
            lse=part_lse,
            return_lse=True,
            **same,
        )
        peak = _fold_slice(total, weight, peak, part.squeeze(1), part_lse, live.unsqueeze(-1))
    # A row without any key is zero, as the kernel leaves it
    weight.masked_fill_(weight == 0, 1.0)
    out.squeeze(1).copy_(total.div_(weight.unsqueeze(-1)))


def _fold_slice(
    total: torch.Tensor,
    weight: torch.Tensor,
    peak: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """Add one slice to a running softmax; changes `total` and `weight`, returns the new peak.

    The kernel's log-sum-exp is in base 2: `part * 2**part_lse` is exactly the slice's sum of
    weighted values. With powers of e instead, a slice that holds 80 % of the weight would get
    88 %. What the kernel returns is taken as it is: a NaN is a fault and shall be seen. Only rows
    without a key in this slice count as nothing, whatever the kernel left in their place.
    """
    new_peak = torch.where(live, torch.maximum(peak, part_lse), peak)
    keep = torch.exp2(peak - new_peak)
    gain = torch.where(live, torch.exp2(part_lse - new_peak), torch.zeros_like(part_lse))
    part = part.to(total.dtype).masked_fill(~live.unsqueeze(-1), 0.0)
    total.mul_(keep.unsqueeze(-1)).addcmul_(part, gain.unsqueeze(-1))
    weight.mul_(keep).add_(gain)
    return new_peak
