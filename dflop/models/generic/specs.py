"""Modules as the planner sees them, from what was read of a model's classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dflop.models.generic.values import Encoder, LayerKind, Structure
from dflop.records import LLM, ModuleSpec


def module_specs(structure: Structure) -> Iterator[ModuleSpec]:
    """Specs of the encoders that have layers, then of the text model."""
    for encoder in structure.main_encoders:  # one that did not run takes no medium
        if encoder.kinds:
            yield _encoder(structure, encoder)
    yield _decoder(structure)


def _decoder(structure: Structure) -> ModuleSpec:
    kinds, depth = structure.kinds, structure.num_layers
    num_entry_layers = max((len(of.deep_layers) for of in structure.encoders), default=0) or 1
    edge = structure.num_entry_params + structure.num_exit_params + structure.num_other_params
    call = next((call for kind in kinds for call in kind.attention), None)
    heads, kv_heads, width = (call.num_heads, call.num_kv_heads, call.head_dim) if call else (0, 0, 0)
    return ModuleSpec(
        LLM, depth, structure.hidden_size, heads, kv_heads, width, _mean(structure.kinds, lambda k: k.mlp_width),
        _mean(kinds, _norm_values), _mean(kinds, lambda k: k.num_params), edge, max(1, depth // num_entry_layers),
        structure.degrees, num_entry_layers, num_mlp_tensors=2, is_gated_mlp=all(k.is_gated_mlp for k in kinds),
        vocab_size=structure.vocab_size, is_tied=structure.is_tied, num_entry_params=structure.num_entry_params,
    )  # fmt: skip


def _encoder(structure: Structure, encoder: Encoder) -> ModuleSpec:
    """With everything of its medium that has no layers, or has them beside the deepest encoder."""
    others = [of for of in structure.encoders if of.medium == encoder.medium and of.path != encoder.path]
    kinds, call = encoder.kinds, next((call for kind in encoder.kinds for call in kind.attention), None)
    inside = sum(len(kind.layers) * kind.num_params for kind in kinds)
    edge = encoder.num_params + encoder.num_projector_params - inside
    edge += sum(of.num_params + of.num_projector_params for of in others)
    heads, kv_heads, width = (call.num_heads, call.num_kv_heads, call.head_dim) if call else (0, 0, 0)
    return ModuleSpec(
        encoder.medium, encoder.num_layers, encoder.hidden_size, heads, kv_heads, width,
        _mean(kinds, lambda k: k.mlp_width), _mean(kinds, _norm_values), _mean(kinds, lambda k: k.num_params), edge, 1,
        (1,), num_mlp_tensors=1 + all(k.is_gated_mlp for k in kinds), is_gated_mlp=all(k.is_gated_mlp for k in kinds),
        num_entry_params=encoder.num_entry_params, num_deep_params=encoder.num_deep_params,
        num_projector_matrix_params=encoder.num_matrix_params, num_input_values=round(encoder.num_input_values),
        deep_layers=encoder.deep_layers,
    )  # fmt: skip


def _norm_values(kind: LayerKind) -> int:
    """What a layer keeps of a token beside attention and MLP, in numbers of 16 bit."""
    attention = sum(
        4 * (of.num_heads * of.head_dim + of.num_kv_heads * of.head_dim) + 4 * of.num_heads for of in kind.attention
    )
    mlp = 2 * (1 + kind.is_gated_mlp) * kind.mlp_width
    return max(0, round(kind.kept_bytes_per_token - attention - mlp) // 2)


def _mean(kinds: Sequence[LayerKind], of: Callable[[LayerKind], int]) -> int:
    """Mean over layers."""
    return round(sum(len(kind.layers) * of(kind) for kind in kinds) / sum(len(kind.layers) for kind in kinds))
