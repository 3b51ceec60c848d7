"""Parameter counts of the layers and towers the families are made of, as closed forms of their configs.

The planner needs sizes where no torch is at hand. `DEFAULTS` are what Hugging Face's config classes fall back to, by
`model_type`; every function takes a complete section. Tests hold both equal to the real classes, per layer, per module
and for the published models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.records import LLM, LayerKind, ModuleSpec

Config = Mapping[str, Any]

_QWEN2 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
_NATIVE = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}  # fmt: skip
_QWEN2_VL_TEXT = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
DEFAULTS: Mapping[str, Config] = {
    "siglip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_channels": 3, "image_size": 224, "patch_size": 16, "vision_use_head": True,
    },
    "internvl_vision": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_channels": 3, "image_size": 448, "patch_size": 14, "attention_bias": False, "use_qk_norm": False,
        "norm_type": "layer_norm", "use_mask_token": False, "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
    },
    "qwen2_vl_vision": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16, "in_channels": 3,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "qwen2_5_vl_vision": _NATIVE,
    "qwen2_5_omni_vision_encoder": _NATIVE,
    "qwen3_vl_vision": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
    },
    "qwen2_audio_encoder": {
        "num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
        "d_model": 1280, "max_source_positions": 1500,
    },
    "qwen2_5_omni_audio_encoder": {
        "num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
        "d_model": 1280, "n_window": 100, "output_dim": 3584,
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128, "attention_bias": False},
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False,
    },
    "qwen2_vl_text": _QWEN2_VL_TEXT,
    "qwen2_5_vl_text": _QWEN2_VL_TEXT,
    "qwen2_5_omni_text": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
    "qwen3_vl_text": _QWEN2 | {"head_dim": 128, "attention_bias": False},
}  # fmt: skip
_QKV_BIAS = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")
DECODERS = (*_QKV_BIAS, "qwen3", "llama", "qwen3_vl_text")
_NORMS_QK = ("qwen3", "qwen3_vl_text")
_NORM, _QK_NORM = 2, 1
"""16-bit values kept of each that a norm is given: it and what comes out, which of query and key counts as these."""


def decoder(c: Config, *, tied: bool, num_deep_features: int = 0) -> ModuleSpec:
    """The language model with its head.

    Args:
        c: Complete section with its `model_type`, one of `DECODERS`.
        tied: Whether the head is the embedding.
        num_deep_features: Deep features of media; each of as many first layers adds one to its output.
    """
    kind, h, mlp, heads = c["model_type"], c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    kv_heads = c["num_key_value_heads"] or heads
    head_dim = c.get("head_dim") or h // heads
    bias = bool(c.get("attention_bias"))
    q, kv = heads * head_dim, kv_heads * head_dim
    layer = 2 * h * q + 2 * h * kv + 3 * h * mlp + 2 * h
    if kind in _QKV_BIAS or bias:
        layer += q + 2 * kv
    layer += h * bias + (2 * mlp + h) * bool(c.get("mlp_bias")) + 2 * head_dim * (kind in _NORMS_QK)
    edge = c["vocab_size"] * h * (1 if tied else 2) + h
    depth, degrees = c["num_hidden_layers"], _degrees(heads, kv_heads, mlp)
    num_entry_layers = num_deep_features or 1
    max_pp = max(1, depth // num_entry_layers)  # of stages as even as they go, the first has so many layers
    norms = 2 * _NORM * h + _QK_NORM * (q + kv) * (kind in _NORMS_QK)
    alike = LayerKind("attention", layer, heads, kv_heads, head_dim, mlp, norms, num_mlp_tensors=2, is_gated_mlp=True)
    return ModuleSpec(
        LLM, ((alike, depth),), h, edge, max_pp, degrees, num_entry_layers, vocab_size=c["vocab_size"], is_tied=tied,
        num_entry_params=c["vocab_size"] * h, num_input_values=num_deep_features * h,
    )  # fmt: skip


def siglip(c: Config, projector: Sequence[int], bias: bool = True) -> ModuleSpec:
    """SigLIP's vision transformer with LLaVA's projector, Linears of the given widths, and its newline."""
    h, mlp = c["hidden_size"], c["intermediate_size"]
    entry = _patches(c) + (c["image_size"] // c["patch_size"]) ** 2 * h
    edge = 2 * h
    if c["vision_use_head"]:
        edge += h + linear(h, 3 * h) + linear(h, h) + 2 * h + _mlp(h, mlp)
    layer = 4 * linear(h, h) + _mlp(h, mlp) + 4 * h
    edge += linears(*projector, bias=bias) + projector[-1]
    return _tower(c, layer, entry, edge, max(_largest(*projector), c["vision_use_head"] * h * max(mlp, 3 * h)))


def internvit(c: Config, projector: Sequence[int]) -> ModuleSpec:
    """InternVL's vision transformer with its projector, a norm and Linears of the given widths.

    Image and patch sizes are one number, squares.

    Raises:
        ConfigError: a norm that Hugging Face's class does not know either.
    """
    h, mlp = c["hidden_size"], c["intermediate_size"]
    norms = {"layer_norm": 2 * h, "rms_norm": h}
    if c["norm_type"] not in norms:
        hint = did_you_mean(c["norm_type"], norms)
        raise ConfigError(f"norm `{c['norm_type']}`", where="model.hf_config.vision_config.norm_type", hint=hint)
    norm = norms[c["norm_type"]]
    layer = 3 * linear(h, h, c["attention_bias"]) + linear(h, h) + _mlp(h, mlp) + 2 * norm + 2 * h
    layer += 2 * h * c["use_qk_norm"]
    positions = (c["image_size"] // c["patch_size"]) ** 2 + 1
    kept = 2 * h * (_NORM + 1 + _QK_NORM * c["use_qk_norm"])  # and two layer scales
    entry = h + _patches(c) + positions * h * c["use_absolute_position_embeddings"] + h * c["use_mask_token"]
    behind = 2 * projector[0] + linears(*projector) + (0 if c["use_mean_pooling"] else 2 * h)
    found = _tower(c, layer, entry, behind, _largest(*projector), num_norm_values=kept, num_remade_values=h)
    return replace(found, tp_choices=(1,)) if c["use_qk_norm"] else found


def qwen2_vision(c: Config) -> ModuleSpec:
    """Native-resolution tower of Qwen2-VL, whose `hidden_size` is the LLM's."""
    h = c["embed_dim"]
    c = {**c, "hidden_size": h, "out_hidden_size": c["hidden_size"], "intermediate_size": h * c["mlp_ratio"]}
    layer = 4 * linear(h, h) + _mlp(h, c["intermediate_size"]) + 4 * h
    found = _native(c, layer, linear(_patch_volume(c), h, bias=False), 2 * h + linears(*_merger(c)))
    return replace(found, merge_tokens=c["spatial_merge_size"] ** 2)


def qwen2_5_vision(c: Config) -> ModuleSpec:
    """Native-resolution tower of Qwen2.5-VL and Qwen2.5-Omni: gated MLP, RMS norms."""
    h, mlp = c["hidden_size"], c["intermediate_size"]
    layer = 4 * linear(h, h) + 2 * linear(h, mlp) + linear(mlp, h) + 2 * h
    # No bias in the patch embedding; the merger has an RMS norm.
    entry, behind = linear(_patch_volume(c), h, bias=False), h + linears(*_merger(c))
    return _native(c, layer, entry, behind, num_mlp_tensors=2, is_gated_mlp=True)


def qwen3_vision(c: Config) -> ModuleSpec:
    """Native-resolution tower of Qwen3-VL: learned positions and one more merger per deepstack feature."""
    h, mlp = c["hidden_size"], c["intermediate_size"]
    layer = 4 * linear(h, h) + _mlp(h, mlp) + 4 * h
    merger, deep_layers = _merger(c), tuple(c["deepstack_visual_indexes"])
    entry = linear(_patch_volume(c), h) + c["num_position_embeddings"] * h
    found = _native(c, layer, entry, linears(*merger) + 2 * h)
    deep = len(deep_layers) * (linears(*merger) + 2 * merger[0])
    return replace(
        found, num_edge_params=found.num_edge_params + deep, num_deep_params=deep, deep_layers=deep_layers,
        merge_tokens=c["spatial_merge_size"] ** 2,
    )  # fmt: skip


def qwen2_audio(c: Config, projector: Sequence[int]) -> ModuleSpec:
    """Whisper's encoder with a projector; its table of positions is a parameter that is not trained."""
    return _whisper(c, c["max_source_positions"] * c["d_model"], 2 * c["d_model"], projector)


def omni_audio(c: Config) -> ModuleSpec:
    """Whisper's layers over chunks, with start and end embeddings and the projection to the LLM."""
    h, out = c["d_model"], c["output_dim"]
    return _whisper(c, 0, 2 * out + 2 * h, (h, out))


def linears(*widths: int, bias: bool = True) -> int:
    """Parameters of Linears one after the other."""
    return sum(linear(fan_in, fan_out, bias) for fan_in, fan_out in pairwise(widths))


def _largest(*widths: int) -> int:
    return max(fan_in * fan_out for fan_in, fan_out in pairwise(widths))


def linear(fan_in: int, fan_out: int, bias: bool = True) -> int:
    """Parameters of a Linear."""
    return fan_in * fan_out + fan_out * bias


def _whisper(c: Config, positions: int, behind: int, projector: Sequence[int]) -> ModuleSpec:
    h, mlp, heads = c["d_model"], c["encoder_ffn_dim"], c["encoder_attention_heads"]
    layer = 3 * linear(h, h) + h * h + _mlp(h, mlp) + 4 * h  # keys have no bias
    entry = 3 * c["num_mel_bins"] * h + h + 3 * h * h + h + positions
    # Two frames of a token, and what GELUs keep behind the convolution over them and the one that joins them.
    inputs = 2 * c["num_mel_bins"] + 5 * h
    behind += linears(*projector)
    edge = inputs, entry, behind, _largest(*projector)
    return _encoder("audio", c["encoder_layers"], h, heads, mlp, layer, *edge, num_mlp_tensors=2)


def _native(c: Config, layer: int, entry: int, behind: int, **kind: Any) -> ModuleSpec:
    h, heads, mlp = c["hidden_size"], c["num_heads"], c["intermediate_size"]
    edge = _patch_volume(c), entry, behind, _largest(*_merger(c))
    return _encoder("vision", c["depth"], h, heads, mlp, layer, *edge, **kind)


def _tower(c: Config, layer: int, entry: int, behind: int, largest: int, **kind: Any) -> ModuleSpec:
    h, heads, mlp = c["hidden_size"], c["num_attention_heads"], c["intermediate_size"]
    inputs = c["num_channels"] * c["patch_size"] ** 2
    return _encoder("vision", c["num_hidden_layers"], h, heads, mlp, layer, inputs, entry, behind, largest, **kind)


def _encoder(
    module: str, depth: int, h: int, heads: int, mlp: int, layer: int, inputs: int, entry: int, behind: int,
    largest: int, **kind: Any,
) -> ModuleSpec:  # fmt: skip
    """Spec of an encoder with a plain MLP, `entry` parameters before its layers and `behind` more behind them.

    The largest matrix of the latter has `largest`.
    """
    alike = LayerKind("attention", layer, heads, heads, h // heads, mlp, **{"num_norm_values": 2 * _NORM * h} | kind)
    return ModuleSpec(
        module, ((alike, depth),), h, entry + behind, 1, _degrees(heads, heads, mlp), num_entry_params=entry,
        num_projector_matrix_params=largest, num_input_values=inputs,
    )  # fmt: skip


def _degrees(heads: int, kv_heads: int, mlp: int) -> tuple[int, ...]:
    """Tensor-parallel degrees that give every rank as many whole heads and columns of the MLP as the next."""
    return tuple(tp for tp in (1, 2, 4, 8) if heads % tp == kv_heads % tp == mlp % tp == 0)


def _mlp(h: int, mlp: int) -> int:
    return linear(h, mlp) + linear(mlp, h)


def _patches(c: Config) -> int:
    return linear(c["num_channels"] * c["patch_size"] ** 2, c["hidden_size"])


def _patch_volume(c: Config) -> int:
    return int(c["in_channels"] * c["temporal_patch_size"] * c["patch_size"] ** 2)


def _merger(c: Config) -> tuple[int, int, int]:
    """Widths of the Linears from the patches of a row to the LLM; norms are counted by the callers."""
    merged = c["hidden_size"] * c["spatial_merge_size"] ** 2
    return merged, merged, c["out_hidden_size"]
