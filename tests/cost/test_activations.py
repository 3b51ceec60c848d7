"""The closed form against the tensors that real layers keep, counted on the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflop.cost.activations import compiled, layer_bytes_per_token
from dflop.models import counts
from dflop.models.attention import PACKED, register
from dflop.models.fusing import fuse
from dflop.parallel.compiled import compile_layers
from dflop.records import LLM, ModuleSpec

NUM_TOKENS = 512
TOLERANCE = 0.03
"""What is left are a few numbers per token (means, variances)."""


def spec_of(module: str, hidden: int, heads: int, kv_heads: int, width: int) -> ModuleSpec:
    if module == LLM:
        text = counts.DEFAULTS["qwen2"] | {
            "model_type": "qwen2", "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": width,
        }  # fmt: skip
        return counts.decoder(text, tied=False)
    vit = counts.DEFAULTS["siglip_vision_model"] | {
        "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": width
    }  # fmt: skip
    return counts.siglip(vit, (0, 0))


def in_half(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A layer in bfloat16; one without data cannot be brought there later."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def kept_bytes_per_token(layer: torch.nn.Module, hidden: int, *, is_frozen: bool, **arguments: Any) -> float:
    """Bytes of the distinct storages that autograd saves in a forward pass, less parameters and what layers share."""
    layer.requires_grad_(not is_frozen)
    others = {t.untyped_storage()._cdata for t in (*layer.parameters(), *arguments.get("position_embeddings", ()))}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in others:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    hidden_states = torch.randn(1, NUM_TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden_states, attention_mask=None, **arguments)
    return sum(kept.values()) / NUM_TOKENS


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "width"),
    [(512, 8, 4, 1376), (256, 4, 4, 1024), (3584, 28, 4, 18944), (8192, 64, 8, 29568)],
    ids=["small", "smaller", "Qwen2.5-7B", "Qwen2.5-72B"],
)
def test_an_llm_layer_keeps_what_the_closed_form_says(hidden, heads, kv_heads, width, is_frozen):
    from transformers import Qwen2Config  # seconds of every collection
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    config = Qwen2Config(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=width,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    spec = spec_of(LLM, hidden, heads, kv_heads, width)
    without_data = FakeTensorMode() if hidden > 512 else nullcontext()
    with without_data:
        layer, positions = in_half(lambda: Qwen2DecoderLayer(config, 0)), torch.arange(NUM_TOKENS)[None]
        rotary = Qwen2RotaryEmbedding(config)(torch.zeros(1, 1, hidden, dtype=torch.bfloat16), positions)
    fuse(layer)
    with without_data:
        counted = kept_bytes_per_token(layer, hidden, is_frozen=is_frozen, position_embeddings=rotary)
    assert layer_bytes_per_token(spec, is_frozen=is_frozen) == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.budget(60, "a layer is traced and differentiated as torch's compiler does")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_compiled_llm_layer_keeps_what_the_closed_form_says(is_frozen):
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    register()
    config = Qwen2Config(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1376, num_hidden_layers=1,
        attn_implementation=PACKED,
    )  # fmt: skip
    layer, positions = in_half(lambda: Qwen2DecoderLayer(config, 0)), torch.arange(NUM_TOKENS)[None]
    rotary = Qwen2RotaryEmbedding(config)(torch.zeros(1, 1, 512, dtype=torch.bfloat16), positions)
    compile_layers([layer], "aot_eager")
    counted = kept_bytes_per_token(layer, 512, is_frozen=is_frozen, position_embeddings=rotary)
    spec = compiled(spec_of(LLM, 512, 8, 4, 1376), is_frozen=is_frozen)
    contiguous = 0 if is_frozen else 2 * 512  # a copy of attention's result, on a CPU
    assert layer_bytes_per_token(spec, is_frozen=is_frozen) + contiguous == pytest.approx(counted, rel=TOLERANCE)


def test_an_encoder_layer_keeps_what_the_closed_form_says():
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    config = SiglipVisionConfig(
        hidden_size=288, num_attention_heads=4, intermediate_size=1076, num_hidden_layers=1, attn_implementation="sdpa"
    )
    spec = spec_of("vision", 288, 4, 4, 1076)
    layer = in_half(lambda: SiglipEncoderLayer(config))
    fuse(layer)
    counted = kept_bytes_per_token(layer, 288, is_frozen=False)
    assert layer_bytes_per_token(spec) == pytest.approx(counted, rel=TOLERANCE)
    assert layer_bytes_per_token(spec, is_frozen=True) == 0, "nothing behind it wants a gradient"


def test_gpt_layers_keep_the_classic_sum():
    """34 h, less two dropout masks of a byte, for nothing here drops anything, and what the activation makes, 8 h."""
    spec = spec_of("vision", 1024, 16, 16, 4096)
    assert layer_bytes_per_token(spec) == pytest.approx((34 - 2 - 8) * 1024, rel=0.01)
    assert layer_bytes_per_token(spec, recompute=True) == 2048
