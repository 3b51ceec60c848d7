"""The MLP of a layer by the names and shapes of its parameters: its width and whether it is gated."""

from __future__ import annotations

from torch import nn

_NO_MLP = ("attn", "attention", "norm", "router", "mixer")
"""Parts of names of parameters that are no MLP's."""
_FUSED = ("gate_up", "gate_and_up", "w13", "fc1_gated")
"""Parts of names of parameters that are a gate and what it multiplies."""


def mlp_of(layer: nn.Module, hidden_size: int, experts: tuple[int, int] = (0, 0)) -> tuple[int, bool]:
    """(width of the MLP that a token passes through, whether it is gated); (0, False) where no MLP is found.

    Args:
        layer: Of a decoder or of a tower.
        hidden_size: Width of its hidden states.
        experts: (all, those of a token) of the layer.
    """
    num_experts, num_active = experts
    into: dict[str, int] = {}
    out = 0
    for name, p in layer.named_parameters():
        if p.ndim < 2 or any(word in name.lower() for word in _NO_MLP):
            continue
        rows, columns = p.shape[-2:]
        if hidden_size not in (rows, columns):
            continue
        width = columns if rows == hidden_size else rows
        if num_experts and p.ndim == 3 and p.shape[0] == num_experts:
            width *= num_active
        elif num_experts and f".{num_experts - 1}." in name:
            width *= num_active  # a list of modules: the last one stands for all
        elif num_experts and any(part.isdigit() for part in name.split(".")) and ".experts." in f".{name}":
            continue
        if any(word in name for word in _FUSED):
            into[name] = width // 2
            into[name + ".gate"] = width // 2
        elif "down" in name or "fc2" in name or "linear_2" in name or (rows == hidden_size and "up" not in name):
            out += width
        else:
            into[name] = width
    return out, sum(into.values()) >= 2 * out > 0
