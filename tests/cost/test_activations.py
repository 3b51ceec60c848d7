"""The closed form against the tensors that real layers keep, counted on the CPU."""

from __future__ import annotations

import pytest
import torch

from dflop.cost.activations import layer_bytes_per_token, mlp_width
from dflop.records import LLM, ModuleSpec

NUM_TOKENS = 512
TOLERANCE = 0.03
"""What is left is shared by all layers (cosines and sines) or a few numbers per token (means, variances)."""


def spec_of(layer: torch.nn.Module, module: str, hidden: int, heads: int, kv_heads: int) -> ModuleSpec:
    num_params = sum(p.numel() for p in layer.parameters())
    return ModuleSpec(module, 1, hidden, heads, kv_heads, num_params, 0, 1, (1,))


def kept_bytes_per_token(layer: torch.nn.Module, hidden: int, *, is_frozen: bool, **arguments: object) -> float:
    """Bytes of the distinct storages that autograd saves in one forward pass, parameters excluded."""
    layer.to(torch.bfloat16).requires_grad_(not is_frozen)
    params = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden_states = torch.randn(1, NUM_TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(hidden_states, attention_mask=None, **arguments)
    assert output is not None
    return sum(kept.values()) / NUM_TOKENS


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("hidden", "heads", "kv_heads", "width"), [(512, 8, 4, 1376), (256, 4, 4, 1024)])
def test_an_llm_layer_keeps_what_the_closed_form_says(hidden, heads, kv_heads, width, is_frozen):
    from transformers import Qwen2Config  # seconds of every collection
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    config = Qwen2Config(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=width,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    layer, positions = Qwen2DecoderLayer(config, 0), torch.arange(NUM_TOKENS)[None]
    spec = spec_of(layer, LLM, hidden, heads, kv_heads)
    rotary = Qwen2RotaryEmbedding(config)(torch.zeros(1, 1, hidden, dtype=torch.bfloat16), positions)
    counted = kept_bytes_per_token(layer, hidden, is_frozen=is_frozen, position_embeddings=rotary)
    assert sum(layer_bytes_per_token(spec, is_frozen=is_frozen)) == pytest.approx(counted, rel=TOLERANCE)
    assert mlp_width(spec) == pytest.approx(width, rel=0.01)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_encoder_layer_keeps_what_the_closed_form_says(is_frozen):
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    config = SiglipVisionConfig(
        hidden_size=288, num_attention_heads=4, intermediate_size=1076, num_hidden_layers=1, attn_implementation="sdpa"
    )
    layer = SiglipEncoderLayer(config)
    spec = spec_of(layer, "vision", 288, 4, 4)
    counted = kept_bytes_per_token(layer, 288, is_frozen=is_frozen)
    assert sum(layer_bytes_per_token(spec, is_frozen=is_frozen)) == pytest.approx(counted, rel=TOLERANCE)
    assert mlp_width(spec) == pytest.approx(1076, rel=0.01)


def test_gpt_layers_keep_the_classic_sum():
    """34 h, less a byte per element of the two dropout masks outside attention: nothing here drops anything."""
    spec = ModuleSpec("vision", 1, 1024, 16, 16, 12 * 1024**2, 0, 1, (1,))
    assert sum(layer_bytes_per_token(spec)) == pytest.approx((34 - 2) * 1024, rel=0.01)
    assert layer_bytes_per_token(spec, recompute=True) == (2048, 0)
