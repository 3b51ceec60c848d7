"""How tensor parallelism cuts each layer class of Hugging Face that the families are made of.

Norms, layer scales and position tables stay whole: they act on the residual stream, which every rank holds whole.
Qwen3's norms of query and key act within a head, so a rank's own heads are all they need. InternViT-6B normalises
query and key over all heads at once, which no rank has: its family offers no split (`tp_choices` of its spec).
"""

from __future__ import annotations

from dflop.models.tensor_split import TensorSplit

_QKV = ("q_proj", "k_proj", "v_proj")
_SELF_ATTN_QKV = tuple(f"self_attn.{name}" for name in _QKV)
_GATED_MLP = ("mlp.gate_proj", "mlp.up_proj")

SIGLIP = TensorSplit(column=(*_SELF_ATTN_QKV, "mlp.fc1"), row=("self_attn.out_proj", "mlp.fc2"))
"""`SiglipEncoderLayer`."""

INTERNVIT = TensorSplit(
    column=(*(f"attention.{name}" for name in _QKV), "mlp.fc1"),
    row=("attention.projection_layer", "mlp.fc2"),
    heads=("attention.num_heads", "attention.embed_dim"),
)
"""`InternVLVisionLayer` without norms of query and key; it shapes by `embed_dim`, which is therefore divided, too."""

WHISPER = TensorSplit(
    column=(*_SELF_ATTN_QKV, "fc1"), row=("self_attn.out_proj", "fc2"), heads=("self_attn.num_heads",)
)
QWEN2_AUDIO = WHISPER
"""`Qwen2AudioEncoderLayer`."""
OMNI_AUDIO = WHISPER
"""`Qwen2_5OmniAudioEncoderLayer`."""

QWEN2_VISION = TensorSplit(
    column=("attn.qkv", "mlp.fc1"), row=("attn.proj", "mlp.fc2"), fused={"attn.qkv": 3}, heads=("attn.num_heads",)
)
"""`Qwen2VLVisionBlock`."""

QWEN2_5_VISION = TensorSplit(
    column=("attn.qkv", *_GATED_MLP),
    row=("attn.proj", "mlp.down_proj"),
    fused={"attn.qkv": 3},
    heads=("attn.num_heads",),
)
"""`Qwen2_5_VLVisionBlock`."""

OMNI_VISION = TensorSplit(
    column=("attn.q", "attn.k", "attn.v", *_GATED_MLP), row=("attn.proj", "mlp.down_proj"), heads=("attn.num_heads",)
)
"""`Qwen2_5OmniVisionBlock`: as Qwen2.5-VL's, but with separate query, key and value."""

QWEN3_VISION = TensorSplit(
    column=("attn.qkv", "mlp.linear_fc1"),
    row=("attn.proj", "mlp.linear_fc2"),
    fused={"attn.qkv": 3},
    heads=("attn.num_heads",),
)
"""`Qwen3VLVisionBlock`."""

QWEN2 = TensorSplit(column=(*_SELF_ATTN_QKV, *_GATED_MLP), row=("self_attn.o_proj", "mlp.down_proj"))
"""`LlamaDecoderLayer`, `Qwen2DecoderLayer`, the thinker's and those of Qwen2-VL and Qwen2.5-VL: heads follow from
`head_dim` by shape."""
QWEN3 = QWEN2
"""`Qwen3DecoderLayer` and `Qwen3VLTextDecoderLayer`."""
