"""Modules as planner and engine see them, from what was read of a model's classes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from dflop.models.family import GENERIC, GENERIC_PARTS, Decoder, Tower
from dflop.models.generic.values import Encoder, LayerKind, Structure
from dflop.records import LLM, ModuleSpec
from dflop.records import LayerKind as Kind

_DEGREES = (1, 2, 4, 8)
_CUT = ("full attention", "sliding attention", "chunked attention")
"""Mixers that tensor parallelism cuts."""


def module_specs(structure: Structure) -> Iterator[ModuleSpec]:
    """Specs of the encoders that have layers, then of the text model."""
    for encoder in structure.main_encoders:
        if encoder.kinds:  # one that did not run takes no medium
            yield _encoder(structure, encoder)
    yield _decoder(structure)


def towers_of(structure: Structure, apart: Collection[str] = ()) -> Mapping[str, Tower]:
    """Where encoders sit in the model, by module.

    Args:
        structure: Of the model.
        apart: Modules whose towers take one item at a time.
    """
    found: dict[str, Tower] = {}
    main = structure.main_encoders
    for of in (*main, *(of for of in structure.encoders if not any(of.medium == m.medium for m in main))):
        if of.medium in found:
            continue
        call = GENERIC_PARTS if of.medium in apart else GENERIC
        beside = [x for x in structure.encoders if x.medium == of.medium and x.path != of.path]
        extras = (*of.projector, *(path for x in beside for path in (x.path, *x.projector)))
        found[of.medium] = Tower(of.path, call, of.layers, extras + (() if found else structure.others))
    return found


def decoder_of(structure: Structure) -> Decoder:
    """Where the text model sits."""
    deep = max((len(encoder.deep_layers) for encoder in structure.encoders), default=0)
    return Decoder(deep, structure.decoder, structure.head)


class Places(NamedTuple):
    """Where a model's modules sit, without its family."""

    towers: Mapping[str, Tower]
    decoder: Decoder


def places_of(structure: Structure, apart: Collection[str] = ()) -> Places:
    """The same of all modules."""
    return Places(towers_of(structure, apart), decoder_of(structure))


def _decoder(structure: Structure) -> ModuleSpec:
    num_deep = max((len(of.deep_layers) for of in structure.encoders), default=0)
    num_entry_layers = num_deep or 1
    other = 0 if any(of.kinds for of in structure.main_encoders) else structure.num_other_params
    return ModuleSpec(
        LLM, _runs(structure.kinds), structure.hidden_size,
        structure.num_entry_params + structure.num_exit_params + other,
        1 if structure.is_whole else max(1, structure.num_layers // num_entry_layers), _tp_choices(structure),
        num_entry_layers, structure.vocab_size, structure.is_tied, structure.num_entry_params,
        num_input_values=num_deep * structure.hidden_size,
    )  # fmt: skip


def _tp_choices(structure: Structure) -> tuple[int, ...]:
    """Degrees that the class allows, where the engine has a rule to cut every kind of layer."""
    return _degrees(structure.kinds) if all(kind.mixer in _CUT for kind in structure.kinds) else (1,)


def _degrees(kinds: Sequence[LayerKind]) -> tuple[int, ...]:
    return tuple(tp for tp in _DEGREES if all(tp in kind.degrees for kind in kinds))


def _encoder(structure: Structure, encoder: Encoder) -> ModuleSpec:
    """With everything of its medium that has no layers, or has them beside the deepest encoder."""
    others = [of for of in structure.encoders if of.medium == encoder.medium and of.path != encoder.path]
    layers = _runs(encoder.kinds)
    edge = encoder.num_params + encoder.num_projector_params - sum(num * kind.num_params for kind, num in layers)
    edge += sum(of.num_params + of.num_projector_params for of in others)
    if encoder.path == structure.main_encoders[0].path:
        edge += structure.num_other_params  # of no module: newlines of pictures and the like
    return ModuleSpec(
        encoder.medium, layers, encoder.hidden_size, edge, 1, _degrees(encoder.kinds),
        num_entry_params=encoder.num_entry_params, num_deep_params=encoder.num_deep_params,
        num_projector_matrix_params=encoder.num_matrix_params,
        num_input_values=round(encoder.num_input_values), deep_layers=encoder.deep_layers,
    )  # fmt: skip


def _runs(kinds: Sequence[LayerKind]) -> tuple[tuple[Kind, int], ...]:
    """Kinds run by run, in the order of depth."""
    found: list[tuple[Kind, int]] = []
    by_index = {index: _kind(of) for of in kinds for index in of.layers}
    for _, kind in sorted(by_index.items(), key=lambda at: at[0]):
        if found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + 1
        else:
            found.append((kind, 1))
    return tuple(found)


def _kind(kind: LayerKind) -> Kind:
    """Heads are those of a layer's first attention; of others it counts widths."""
    call, num_mlp_tensors = next(iter(kind.attention), None), 1 + kind.is_gated_mlp
    heads = (call.num_heads, call.num_kv_heads, call.head_dim) if call else (0, 0, 0)
    attention = 4 * (heads[0] + heads[1]) * heads[2] + 4 * heads[0]
    beside = kind.kept_bytes_per_token - attention - 2 * num_mlp_tensors * kind.mlp_width
    stacks = bool(kind.num_stacked_params)
    return Kind(
        kind.name, kind.num_params, *heads, kind.mlp_width, max(0, round(beside / 2)), num_mlp_tensors,
        kind.is_gated_mlp, kind.num_active_params if kind.num_experts else 0, kind.num_matrix_params,
        kind.kept_bytes_per_token, stacks * kind.num_experts, stacks * kind.num_active_experts,
        kind.num_stacked_params, kind.num_state_values,
    )  # fmt: skip
