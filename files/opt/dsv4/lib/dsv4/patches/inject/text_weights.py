"""The weights of a vision pack that the text model has a place for."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# dsv4: from here on this is injected


def _text_weights(
    weights: Iterable[tuple[str, torch.Tensor]], config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out what only the vision model uses, and refuse what would be routed wrongly.

    With another `topk_method` this model makes no parameter for the router's biases. Leaving
    them all out would load, and send every token to the wrong experts.
    """
    method = getattr(config, "topk_method", None)
    if method != "noaux_tc":
        raise ValueError(
            f"config.json: topk_method has to be 'noaux_tc' (got {method!r}): the router's "
            "biases would have no place; serve the view that dsv4 pack_config builds"
        )
    return (
        (name, weight) for name, weight in weights if _is_text_weight(name, config.num_hash_layers)
    )


def _is_text_weight(name: str, hash_layers: int) -> bool:
    """Tell whether the text model uses a tensor of the pack.

    The first layers route by a table of token ids: their bias is in the pack, but unused.
    """
    if name.startswith(("vision.", "aligner.", "image_")):
        return False
    if name.endswith(".ffn.gate.bias_vl"):
        return False
    bias = re.fullmatch(r"layers\.(\d+)\.ffn\.gate\.bias", name)
    return bias is None or int(bias[1]) >= hash_layers
