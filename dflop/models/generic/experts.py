"""Where a layer of transformers has its experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

_TAKES = {"hidden_states", "top_k_index", "top_k_weights"}


def experts_of(layer: nn.Module) -> Iterator[Any]:
    """Modules of a layer that hold all its experts' weights along the first axis, and are called with a routing."""
    for module in layer.modules():
        num_experts, own = getattr(module, "num_experts", 0), list(module.parameters())
        is_stacked = any(p.ndim == 3 for p in own) and all(len(p) == num_experts for p in own)
        if is_stacked and inspect.signature(module.forward).parameters.keys() >= _TAKES:
            yield module
