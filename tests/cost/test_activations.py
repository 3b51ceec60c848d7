"""The closed form against the tensors that real layers keep, counted on the CPU."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflop.cost.activations import compiled, layer_bytes_per_token
from dflop.models import attention, counts
from dflop.models.attention import CUTTING, PACKED, register
from dflop.models.fusing import fuse
from dflop.parallel.compiled import compile_layers
from dflop.records import LLM, ModuleSpec
from tests.train.maskless import maskless

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

    shape = (NUM_TOKENS, hidden) if "cu_seqlens" in arguments else (1, NUM_TOKENS, hidden)
    hidden_states = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden_states, **arguments)
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


def compiled_bytes_per_token(
    layer: torch.nn.Module, hidden: int, *, is_frozen: bool = False, **arguments: Any
) -> float:
    """As `kept_bytes_per_token`, with the partition of torch's compiler, less a CPU's copy of attention's result."""
    torch._dynamo.reset()
    compile_layers([layer], "aot_eager_decomp_partition")
    counted = kept_bytes_per_token(layer, hidden, is_frozen=is_frozen, **arguments)
    return counted - (0 if is_frozen else 2 * hidden)


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
    counted = compiled_bytes_per_token(layer, 512, is_frozen=is_frozen, position_embeddings=rotary)
    spec = compiled(spec_of(LLM, 512, 8, 4, 1376), is_frozen=is_frozen)
    assert layer_bytes_per_token(spec, is_frozen=is_frozen) == pytest.approx(counted, rel=TOLERANCE)


TOWERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "SigLIP": ("siglip", "Siglip", "SiglipEncoderLayer", {}),
    "InternViT-300M": ("internvl", "InternVL", "InternVLVisionLayer", {"attention_bias": True}),
    "InternViT-6B": ("internvl", "InternVL", "InternVLVisionLayer", {"use_qk_norm": True, "norm_type": "rms_norm"}),
    "Qwen2.5-VL": ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2_5_VLVisionBlock", {"num_heads": 4}),
    "Qwen3-VL": ("qwen3_vl", "Qwen3VL", "Qwen3VLVisionBlock", {"num_heads": 4}),
}
"""(transformers' module, prefix of its config, class of a layer, entries of the config)."""
WIDTHS = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}


def tower_spec(name: str) -> ModuleSpec:
    kind, given = TOWERS[name][0], WIDTHS | TOWERS[name][3]
    if kind == "siglip":
        return spec_of("vision", 256, 4, 4, 1024)
    if kind == "internvl":
        return counts.internvit(counts.DEFAULTS["internvl_vision"] | given, (256, 8))
    if kind == "qwen3_vl":
        return counts.qwen3_vision(counts.DEFAULTS["qwen3_vl_vision"] | given)
    return counts.qwen2_5_vision(counts.DEFAULTS["qwen2_5_vl_vision"] | given)


@pytest.mark.budget(60, "a layer is traced and differentiated as torch's compiler does")
@pytest.mark.parametrize("name", TOWERS)
def test_a_compiled_encoder_layer_keeps_what_the_closed_form_says(name):
    import transformers

    register()
    kind, prefix, layer_class, more = TOWERS[name]
    config = getattr(transformers, f"{prefix}VisionConfig")(**WIDTHS | more)
    config._attn_implementation = CUTTING if kind.startswith("qwen") else PACKED
    file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    layer = in_half(lambda: getattr(file, layer_class)(config))
    rotary = tuple(torch.randn(NUM_TOKENS, 64, dtype=torch.bfloat16) for _ in range(2))
    bounds = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)
    packed = {"cu_seqlens": bounds, "max_seqlen": NUM_TOKENS, "position_embeddings": rotary}
    given: dict[str, dict[str, Any]] = {"siglip": {"attention_mask": None}, "internvl": {}}
    with patch.object(attention.F, "scaled_dot_product_attention", maskless):
        counted = compiled_bytes_per_token(layer, 256, **given.get(kind, packed))
    assert layer_bytes_per_token(compiled(tower_spec(name))) == pytest.approx(counted, rel=TOLERANCE)


def test_an_encoder_layer_keeps_what_the_closed_form_says():
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    config = SiglipVisionConfig(
        hidden_size=288, num_attention_heads=4, intermediate_size=1076, num_hidden_layers=1, attn_implementation="sdpa"
    )
    spec = spec_of("vision", 288, 4, 4, 1076)
    layer = in_half(lambda: SiglipEncoderLayer(config))
    fuse(layer)
    counted = kept_bytes_per_token(layer, 288, is_frozen=False, attention_mask=None)
    assert layer_bytes_per_token(spec) == pytest.approx(counted, rel=TOLERANCE)
    assert layer_bytes_per_token(spec, is_frozen=True) == 0, "nothing behind it wants a gradient"


def test_gpt_layers_keep_the_classic_sum():
    """34 h, less two dropout masks of a byte, for nothing here drops anything, and what the activation makes, 8 h."""
    spec = spec_of("vision", 1024, 16, 16, 4096)
    assert layer_bytes_per_token(spec) == pytest.approx((34 - 2 - 8) * 1024, rel=0.01)
    assert layer_bytes_per_token(spec, recompute=True) == 2048
