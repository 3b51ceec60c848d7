"""Where a layer of transformers has the router of its experts, and by which rule its logits become probabilities.

Routers return (logits, weights of the chosen experts, chosen experts, ...). The rule is read from the class's own
forward: a small copy routes random tokens, and weights in proportion to the softmax or to the sigmoid of the logits
tell which. A router of another form, or by another rule, is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.generic.experts import experts_of

Scores = Callable[[torch.Tensor], torch.Tensor]
"""Logits `[tokens, experts]` to probabilities, of which each token's sum is 1; in float32 or more precise."""
_NUM_PROBES = 16


@dataclass(frozen=True, slots=True)
class Router:
    """The router of one layer."""

    path: str
    """Within the layer."""
    num_experts: int
    num_active: int
    """Experts of a token."""
    scores: Scores


def routers_of(layers: Iterable[nn.Module], hidden_size: int) -> dict[int, Router]:
    """Routers by index of the layer; layers without experts have none.

    Args:
        layers: Of a whole decoder, which need not have memory.
        hidden_size: Width of what they take.

    Raises:
        ConfigError: the probabilities of a layer's router cannot be read.
    """
    known: dict[tuple[type[nn.Module], int], tuple[Scores, int]] = {}
    found = {}
    for index, layer in enumerate(layers):
        experts = set(experts_of(layer))
        if not experts:
            continue
        paths = [name for name, module in layer.named_modules() if module in experts]
        path = _router_path(layer, paths[0]) if len(paths) == 1 else ""
        if not path:
            what = f"has {len(paths)} sets of experts" if len(paths) > 1 else "has experts and no router next to them"
            raise ConfigError(f"layer {index}, a {type(layer).__name__}, {what}", where="train.router_loss", hint=_HINT)
        router, num_experts = layer.get_submodule(path), experts.pop().num_experts
        key = type(router), num_experts
        if key not in known:
            known[key] = _rule_of(router, num_experts, hidden_size)
        scores, num_active = known[key]
        found[index] = Router(path, num_experts, num_active, scores)
    return found


_HINT = "train.router_loss: 0, and `output_router_logits: false` in the model's config"


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """As `Scores`."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """As `Scores`; the sum is made 1 as in DeepSeek-V3 (arXiv 2412.19437, equation 19)."""
    each = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
    return each / each.sum(-1, keepdim=True)


def _router_path(layer: nn.Module, experts_path: str) -> str:
    """The module next to the experts with a matrix of a row per expert; empty: there is none."""
    above, _, name = experts_path.rpartition(".")
    parent = layer.get_submodule(above)
    num_experts = parent.get_submodule(name).num_experts
    for child, module in parent.named_children():
        if child != name and any(p.ndim == 2 and len(p) == num_experts for p in module.parameters()):
            return f"{above}.{child}" if above else child
    return ""


def _rule_of(router: nn.Module, num_experts: int, hidden_size: int) -> tuple[Scores, int]:
    """(probabilities, experts of a token) by a copy with random weights.

    Raises:
        ConfigError: neither rule gives the weights that the router gives, or it returns something else.
    """
    generator = torch.Generator().manual_seed(0)
    small = copy.deepcopy(router).to_empty(device="cpu").float()
    for p in small.parameters():
        p.data.normal_(0.0, hidden_size**-0.5, generator=generator)
    for buffer in small.buffers():
        buffer.zero_()
    try:
        with torch.no_grad():
            out: Any = small(torch.randn(_NUM_PROBES, hidden_size, generator=generator))
        logits, weights, chosen = out[:3]
        num_active = weights.shape[-1]
        if logits.shape == (_NUM_PROBES, num_experts) and weights.shape == chosen.shape:
            for scores in (softmax, sigmoid):
                if _is_in_proportion(weights.float(), scores(logits).gather(1, chosen)):
                    return scores, num_active
    except Exception:  # whatever a class raises that takes or returns something else
        pass
    raise ConfigError(
        f"the probabilities of {type(router).__name__} cannot be read, which its load balancing loss needs",
        where="train.router_loss", hint=_HINT,
    )  # fmt: skip


def _is_in_proportion(weights: torch.Tensor, scores: torch.Tensor) -> bool:
    """Whether each token's weights are in proportion to the scores; a single one must be the score itself."""
    if weights.shape[-1] > 1:
        weights, scores = (x / x.sum(-1, keepdim=True) for x in (weights, scores))
    return torch.allclose(weights, scores, rtol=1e-4)
