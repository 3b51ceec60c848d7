"""Bytes a transformer layer keeps for its backward pass, in closed form: 16-bit, flash attention, no dropout.

Counted from what each operation needs to differentiate itself, per token, with h the hidden size, k the size of all
key heads and I the width of the MLP; the classic sum for GPT layers is 34 h (Korthikanti et al., arXiv 2205.05198):

    LLM (RMSNorm in 32 bit, grouped keys, gated MLP)           encoder (LayerNorm, plain MLP of two matrices)
    norms       2 * (4 h input in 32 bit, 2 h normed, 2 h out)  2 * (2 h input, 2 h out)
    attention   2 h query, 2 k key, 2 k value, 2 h result       the same with k = h
    MLP         2 I gate, 2 I act(gate), 2 I up, 2 I product    2 I before, 2 I behind the activation
    and 4 bytes per head, the logarithm of attention's denominator

I follows from the parameters of a layer; an encoder with a gated MLP of the same parameters keeps a third more of it.
With frozen weights no Linear keeps its input: that leaves what norms, attention and activation functions need. A layer
that recomputes keeps its input, 2 h. `tests/cost/test_activations.py` counts the tensors of a real layer.
"""

from __future__ import annotations

from dflop.records import LLM, ModuleSpec


def mlp_width(spec: ModuleSpec) -> float:
    """I, from the parameters that attention does not explain; biases and norms count as noise."""
    h = spec.hidden_size
    attention = 2 * h * h * (1 + spec.num_kv_heads / spec.num_heads)
    return max(0.0, spec.num_layer_params - attention) / ((3 if spec.module == LLM else 2) * h)


def layer_bytes_per_token(spec: ModuleSpec, *, is_frozen: bool = False, recompute: bool = False) -> tuple[float, float]:
    """(whole, split): bytes per token and layer that every tensor-parallel rank keeps, and that the ranks share."""
    h, width = spec.hidden_size, mlp_width(spec)
    if recompute:
        return 2.0 * h, 0.0
    attention = 4.0 * h * (1 + spec.num_kv_heads / spec.num_heads) + 4.0 * spec.num_heads
    if spec.module == LLM:
        return (8.0 * h, attention + 6.0 * width) if is_frozen else (16.0 * h, attention + 8.0 * width)
    return (4.0 * h, attention + 2.0 * width) if is_frozen else (8.0 * h, attention + 4.0 * width)


def edge_bytes(spec: ModuleSpec) -> float:
    """Bytes of everything outside the layers, per token of an encoder and per supervised token of an LLM.

    An LLM's head keeps the logits in 16 bit and once more in 32 for the cross entropy; the vocabulary is taken from
    untied embedding and head (a tied one is underestimated by half). An encoder's edge keeps its input and output.
    """
    if spec.module == LLM:
        return 6.0 * spec.num_edge_params / (2 * spec.hidden_size)
    return 4.0 * spec.hidden_size
