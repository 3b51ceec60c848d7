"""How tensor parallelism cuts the layers of Hugging Face's models, after Megatron-LM (arXiv 1909.08053, section 3).

Columns of the first matrix of a pair (query, key, value; gate, up), rows of the second (output; down): between the two
nothing is exchanged, behind the second the ranks sum. Which of the two a Linear is follows from its name, the same in
all families. Norms, layer scales and position tables stay whole: they act on the residual stream, which every rank
holds whole. Qwen3's norms of query and key act within a head, so a rank's own heads are all they need. InternViT-6B
normalises query and key over all heads at once, which no rank has: its family offers no split (`tp_choices` of its
spec).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

_SAME_FOR_A_PART = ("head_dim", "num_key_value_groups")
"""What attention of a part of the heads has as well as that of all."""


def is_column_or_row(name: str) -> bool:
    """Whether a Linear of this name is of attention or an MLP, whose matrices ranks can share."""
    return name.rpartition(".")[2] in (*_COLUMN, *_ROW)


def is_row(name: str) -> bool:
    """Whether ranks share the inputs of a Linear of this name, not its outputs."""
    return name.rpartition(".")[2] in _ROW


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """Names are relative to a layer, as in `self_attn.q_proj`."""

    column: tuple[str, ...]
    """Linears whose outputs are split."""
    row: tuple[str, ...]
    """Linears whose inputs are split; their outputs are summed over the ranks, their bias is added once."""
    fused: Mapping[str, int]
    """Linears of `column` that stack so many matrices (3 for query, key, value), split alike."""
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


def degrees_of(layer: Any, among: Iterable[int]) -> tuple[int, ...]:
    """Degrees at which ranks share a layer of a tower, 1 alone where something in it follows no known rule.

    Known are norms and scales, Linears by name, and attention that makes heads of `head_dim` and what `_HEADS` names.
    """
    linears = [module for module in layer.modules() if hasattr(module, "in_features")]
    inside = {id(p) for module in linears for p in module.parameters()}
    try:
        split = split_of(layer)
    except ConfigError:
        return (1,)
    attentions = [parent for parent in entrances(layer, split) if _num_head_sizes(parent)]
    if any(p.ndim > 1 and id(p) not in inside for p in layer.parameters()) or not attentions:
        return (1,)
    if any(not hasattr(parent, "head_dim") or _num_head_sizes(parent) > _num_known(parent) for parent in attentions):
        return (1,)
    return tuple(degree for degree in among if _divides(layer, split, degree))


def _num_head_sizes(module: Any) -> int:
    """Whole numbers that a module has about heads."""
    return sum("head" in name and type(value) is int for name, value in vars(module).items())


def _num_known(module: Any) -> int:
    names = (*(name for name in _HEADS if "head" in name), *_SAME_FOR_A_PART)
    return sum(type(getattr(module, name, None)) is int for name in names)


def _divides(layer: Any, split: TensorSplit, degree: int) -> bool:
    try:
        check_split(layer, split, degree)
    except ConfigError:
        return False
    return True


def check_split(layer: Any, split: TensorSplit, degree: int) -> None:
    """Refuse a layer that `degree` ranks cannot share evenly.

    Raises:
        ConfigError: it has heads or a width that the degree does not divide.
    """
    kind = type(layer).__name__
    for name in split.heads:
        number: Any = getattr(*holder_of(layer, name))
        if number % degree:
            raise cannot_split(f"`{name}` of {kind}, {number},", degree)
    widths = set()
    for name in (*split.column, *split.row):
        linear: Any = layer.get_submodule(name)
        holder, _ = holder_of(layer, name)
        width = linear.in_features if name in split.row else linear.out_features // split.fused.get(name, 1)
        num_heads = width // holder.head_dim if hasattr(holder, "head_dim") else 0
        if num_heads % degree:
            raise cannot_split(f"the {num_heads} heads of `{name}` of {kind}", degree)
        if width % degree:
            raise cannot_split(f"the width {width} of `{name}` of {kind}", degree)
        widths.add((name.rpartition(".")[0], width))
    for name, p in _between(layer, split).items():
        if any(name.startswith(f"{parent}.") and len(p) == width for parent, width in widths):
            what = f"`{name}` of {kind} works on all heads at once, which tensor-parallel ranks do not have"
            raise ConfigError(what, where="plan", hint="use tp = 1 for this module")


def entrances(layer: Any, split: TensorSplit) -> list[Any]:
    """What holds column-split Linears: their parent, as `self_attn`, or a Linear that lies in the layer itself."""
    return [layer.get_submodule(n) for n in dict.fromkeys(n.rpartition(".")[0] or n for n in split.column)]


def holder_of(layer: Any, name: str) -> tuple[Any, str]:
    """(module, attribute) of a dotted name in a layer."""
    parent, _, attribute = name.rpartition(".")
    return layer.get_submodule(parent), attribute


def cannot_split(what: str, degree: int) -> ConfigError:
    """The error for something that a degree does not divide."""
    return ConfigError(
        f"{what} cannot be split over {degree} tensor-parallel ranks", where="plan", hint="use a tp that divides it"
    )


def _between(layer: Any, split: TensorSplit) -> dict[str, Any]:
    """Parameters of parents of column-split Linears that are whole on every rank, by name."""
    cut = {p for name in (*split.column, *split.row) for p in layer.get_submodule(name).parameters()}
    beside = {p for module in entrances(layer, split) for p in module.parameters()} - cut
    return {name: p for name, p in layer.named_parameters() if p in beside}
