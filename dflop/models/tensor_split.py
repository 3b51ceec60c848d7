"""How the layers of a module are cut over tensor-parallel ranks, after Megatron-LM (arXiv 1909.08053, section 3).

Columns of the first matrix of a pair (query, key, value; gate, up), rows of the second (output; down): between the two
nothing is exchanged, behind the second the ranks sum. What is not named here is held whole by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """Names are relative to a layer, as in `self_attn.q_proj`."""

    column: tuple[str, ...]
    """Linears whose outputs are split."""
    row: tuple[str, ...]
    """Linears whose inputs are split; their outputs are summed over the ranks, their bias is added once."""
    fused: Mapping[str, int] = field(default_factory=dict)
    """Of `column`: Linears that hold so many matrices one above the other (3 for query, key, value), split alike."""
    heads: tuple[str, ...] = ()
    """Integer attributes to divide by the degree, such as `self_attn.num_heads`."""
