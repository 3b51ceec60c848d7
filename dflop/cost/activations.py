"""Bytes a transformer layer keeps for its backward pass, in closed form: 16-bit, flash attention, no dropout.

Counted from what each operation needs to differentiate itself, per token, with h the hidden size, q and k the widths of
all query and key heads and I that of the MLP; the classic sum for GPT layers is 34 h (Korthikanti et al., arXiv
2205.05198):

    norms        2 * (2 h input, 2 h out)
    attention    2 q query, 2 k key, 2 k value, 2 q result, and 4 per head, the logarithm of its denominator
    gated MLP    2 I gate, 2 I up; what is made of them is made again (models/fused.py)
    plain MLP    2 I before the activation; in Whisper's layers 2 I behind it, too
    and what stands in `LayerKind.num_norm_values` of norms of query and key and of layer scales

Ranks of a tensor-parallel group share all of that (`parallel/tokens.py`).

With frozen weights no Linear of an LLM keeps its input: that leaves what norms, attention and activation functions
need; after a frozen encoder no layer needs a gradient. A layer that recomputes keeps its input, 2 h. Kinds of layers
that are counted on their classes state their bytes. `tests/cost/test_activations.py` counts the tensors of real layers.
"""

from __future__ import annotations

import dataclasses

from dflop.records import LLM, LayerKind, ModuleSpec


def layer_bytes_per_token(spec: ModuleSpec, *, is_frozen: bool = False, recompute: bool = False) -> float:
    """Bytes per token of a mean layer that the tensor-parallel ranks share."""
    if is_frozen and spec.module != LLM:
        return 0.0
    if recompute:
        return 2.0 * spec.hidden_size
    return spec.mean(lambda kind: kind_bytes_per_token(kind) - is_frozen * kind.num_norm_values)


def kind_bytes_per_token(kind: LayerKind) -> float:
    """Bytes per token that a trained layer keeps."""
    attention = 4.0 * (kind.query_width + kind.key_width) + 4.0 * kind.num_heads
    mlp = 2.0 * kind.num_mlp_tensors * kind.mlp_width
    return kind.kept_bytes_per_token or 2.0 * kind.num_norm_values + attention + mlp


def compiled(spec: ModuleSpec, *, is_frozen: bool = False) -> ModuleSpec:
    """A module with compiled layers: with weights that train they keep what goes into the MLP's last Linear, too.

    So do kinds that are counted on their classes; Whisper's layers keep it eager as well.
    """
    return spec if is_frozen else dataclasses.replace(spec, layers=tuple((_compiled(of), n) for of, n in spec.layers))


def _compiled(kind: LayerKind) -> LayerKind:
    counted = kind.kept_bytes_per_token and kind.kept_bytes_per_token + 2.0 * kind.mlp_width
    return dataclasses.replace(
        kind, num_mlp_tensors=2 + kind.is_gated_mlp, num_norm_values=kind.num_norm_values - kind.num_remade_values,
        kept_bytes_per_token=counted,
    )  # fmt: skip


def edge_bytes(spec: ModuleSpec, *, is_frozen: bool = False) -> tuple[float, float]:
    """Bytes that every rank keeps of everything outside the layers, (per token, per item).

    Of an LLM that is the norm before the head, deep features before the layers and, of an item, a token that carries
    loss, the gradient of its hidden state, which the loss has made. An encoder's edge keeps its input, and about as
    much for its projector as a norm.
    """
    if spec.module != LLM:
        return (0.0, 0.0) if is_frozen else (2.0 * spec.num_input_values + 8.0 * spec.hidden_size, 0.0)
    return (4.0 if is_frozen else 6.0) * spec.hidden_size + 2.0 * spec.num_input_values, 2.0 * spec.hidden_size
