"""Where a layer of transformers has its experts, and how many tokens go to each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dflop.models.autograd import in_backward

_TAKES = {"hidden_states", "top_k_index", "top_k_weights"}


def experts_of(layer: nn.Module) -> Iterator[Any]:
    """Modules of a layer that hold all its experts' weights along the first axis, and are called with a routing."""
    for module in layer.modules():
        num_experts, own = getattr(module, "num_experts", 0), list(module.parameters())
        is_stacked = any(p.ndim == 3 for p in own) and all(len(p) == num_experts for p in own)
        if is_stacked and inspect.signature(module.forward).parameters.keys() >= _TAKES:
            yield module


class RoutedTokens:
    """Counts the tokens of a rank that its layers route to each expert; layers that run again count once.

    The counts stay on the device, where adding to them is one small kernel per layer; reading them waits for it.

    Args:
        layers: As they run, by index in the decoder.
        ep: Ranks that share the experts of each.
    """

    def __init__(self, layers: Mapping[int, nn.Module], ep: int = 1) -> None:
        self._counts: dict[int, torch.Tensor] = {}
        for index, layer in layers.items():
            for experts in experts_of(layer):
                self._counts[index] = torch.zeros(experts.num_experts * ep, dtype=torch.int64)
                experts.register_forward_pre_hook(self._counting(index), with_kwargs=True)

    def take(self) -> dict[int, Sequence[int]]:
        """Tokens of each expert by layer since the last call."""
        found: dict[int, Sequence[int]] = {index: counts.tolist() for index, counts in self._counts.items()}
        for counts in self._counts.values():
            counts.zero_()
        return found

    def _counting(self, index: int) -> Any:
        def count(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if in_backward() or not torch.is_grad_enabled():
                return
            chosen = (kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]).reshape(-1)
            counts = self._counts[index] = self._counts[index].to(chosen.device)
            counts.scatter_add_(0, chosen, torch.ones_like(chosen))

        return count
