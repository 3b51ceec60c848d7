"""How tensor parallelism cuts the layers of Hugging Face's models, after Megatron-LM (arXiv 1909.08053, section 3).

Columns of the first matrix of a pair (query, key, value; gate, up), rows of the second (output; down): between the two
nothing is exchanged, behind the second the ranks sum. Which of the two a Linear is follows from its name, the same in
all families. Norms, layer scales and position tables stay whole: they act on the residual stream, which every rank
holds whole. Qwen3's norms of query and key act within a head, so a rank's own heads are all they need. InternViT-6B
normalises query and key over all heads at once, which no rank has: its family offers no split (`tp_choices` of its
spec).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflop.errors import ConfigError

_COLUMN = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "qkv", "gate_proj", "up_proj", "fc1", "linear_fc1")
_ROW = ("o_proj", "out_proj", "projection_layer", "proj", "down_proj", "fc2", "linear_fc2")
_FUSED = {"qkv": 3}
LORA_A, LORA_B = "lora_A", "lora_B"
"""The two Linears of an adapter, inside the Linear that it belongs to; they are cut with it."""
_HEADS = ("num_heads", "embed_dim")
"""What attention of some kinds shapes by; that of others takes the number of heads from `head_dim` and the width."""


def is_column_or_row(name: str) -> bool:
    """Whether a Linear of this name is of attention or an MLP, whose matrices ranks can share."""
    return name.rpartition(".")[2] in (*_COLUMN, *_ROW)


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """Names are relative to a layer, as in `self_attn.q_proj`."""

    column: tuple[str, ...]
    """Linears whose outputs are split."""
    row: tuple[str, ...]
    """Linears whose inputs are split; their outputs are summed over the ranks, their bias is added once."""
    fused: Mapping[str, int]
    """Of `column`: Linears that hold so many matrices one above the other (3 for query, key, value), split alike."""
    heads: tuple[str, ...]
    """Integer attributes to divide by the degree, such as `self_attn.num_heads`."""


def split_of(layer: Any) -> TensorSplit:
    """How a layer is cut.

    Raises:
        ConfigError: it has a Linear of a name that is not known.
    """
    named = (name for name, module in layer.named_modules() if hasattr(module, "in_features"))
    kinds = {name: kind for name in named if (kind := name.rpartition(".")[2]) not in (LORA_A, LORA_B)}
    if unknown := [name for name in kinds if not is_column_or_row(name)]:
        message = f"no rule splits `{unknown[0]}` of {type(layer).__name__}"
        raise ConfigError(message, where="plan", hint="use tp = 1 for this module")
    column = tuple(name for name, kind in kinds.items() if kind in _COLUMN)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in column)
    return TensorSplit(
        column,
        row=tuple(name for name, kind in kinds.items() if kind in _ROW),
        fused={name: _FUSED[kinds[name]] for name in column if kinds[name] in _FUSED},
        heads=tuple(f"{p}.{name}" for p in parents if p for name in _HEADS if hasattr(layer.get_submodule(p), name)),
    )
