"""Weights in the order the vision model needs, without holding the pack in memory."""

from collections.abc import Iterable, Iterator

import torch

# dsv4: from here on this is injected


def _language_model_first(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass on the language model's weights as they come, then all others.

    The language model has to get its weights in one run. Sorting does that too, but has every
    tensor of the pack in memory first: 94 GiB, on a machine that shares its memory with the GPU.
    The others (the vision tower, 0.9 GB) wait as copies, because a view into a shard would keep
    the whole shard.
    """
    held = []
    for name, tensor in weights:
        if name.startswith("language_model."):
            yield name, tensor
        else:
            copy = tensor.clone()
            # What the name mapping noted on the tensor, such as its place in a fused weight
            copy.__dict__.update(tensor.__dict__)
            held.append((name, copy))
            del copy
        # Not even the last one is kept while the next is read
        del name, tensor
    held.reverse()
    while held:
        yield held.pop()
