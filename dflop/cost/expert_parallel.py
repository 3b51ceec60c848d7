"""What expert parallelism adds to the passes of a module: rows that ranks exchange, and the rank that gets most.

Per layer with experts a token goes to those that it is routed to and comes back: two all-to-alls forward, two backward,
and two more where the layer runs again, inside a node, hidden behind nothing. The part of `ep - 1` of `ep` leaves the
rank. A message of the rows' numbers comes first, for which the host waits.

All ranks of a group wait for the one whose experts get most rows. How many that are depends on router and batch, and
nothing of it has been measured: `IMBALANCE` is an assumption, for rows sent, products of experts and their memory.
"""

from __future__ import annotations

from dflop.cost.curve import Floats
from dflop.records import LayerKind, ModuleSpec

IMBALANCE = 1.2
"""Rows of the rank with most of a group's over the mean of its ranks."""
_NUM_MESSAGES = 3


def exchange_seconds(
    spec: ModuleSpec, ep: int, num_tokens: Floats, line: tuple[float, float], value_bytes: int
) -> Floats:  # fmt: skip
    """Seconds in which a mean layer's rows go to their experts and come back, once.

    Args:
        spec: Of the module.
        ep: Ranks that share experts.
        num_tokens: Of a rank.
        line: Of a message between two ranks of a node: (seconds, seconds per byte).
        value_bytes: Of an element of the hidden states.
    """
    latency_s, s_per_byte = line
    share = spec.mean(lambda kind: float(kind.num_experts > 0))
    rows = spec.mean(lambda kind: kind.num_active_experts) * num_tokens * IMBALANCE * (ep - 1) / ep
    found: Floats = (num_tokens > 0) * _NUM_MESSAGES * share * latency_s + 2 * s_per_byte * value_bytes * (
        spec.hidden_size * rows
    )
    return found


def slower_frac(spec: ModuleSpec) -> float:
    """By how much a mean layer's products take longer than with even experts, attention over pairs of tokens aside."""
    used = spec.mean(lambda kind: kind.num_used_params)
    return (IMBALANCE - 1) * spec.mean(_used_expert_params) / used if used else 0.0


def uneven_bytes_per_token(spec: ModuleSpec, value_bytes: int) -> float:
    """What a mean layer keeps more of each token of a rank: rows of others, and what experts make of them."""
    return (
        (IMBALANCE - 1)
        * value_bytes
        * spec.mean(
            lambda kind: (
                (kind.num_experts > 0)
                * (kind.num_active_experts * spec.hidden_size + (1 + kind.num_mlp_tensors) * kind.mlp_width)
            )
        )
    )


def _used_expert_params(kind: LayerKind) -> float:
    return kind.num_expert_params * kind.num_active_experts / kind.num_experts if kind.num_experts else 0.0
