"""Qwen2-VL: a native-resolution vision tower that attends over whole frames, feeding a Qwen2 decoder.

Media are those of Qwen2.5-VL (`native.py`). The tower differs from its: LayerNorm, a plain MLP, no windows, and
`embed_dim` for its width where `hidden_size` is that of the LLM; so do positions, where every temporal patch counts one
however long it lasts.
"""

from __future__ import annotations

from dflop.models import counts, splits
from dflop.models.family import Decoder, Tower
from dflop.models.media import MediaTokens
from dflop.models.native import IMAGE_LIMITS, IMAGE_SETTINGS, SHRINKABLE, VIDEO_LIMITS, VIDEO_SETTINGS
from dflop.models.native_family import NativeFamily
from dflop.records import LLM, ModuleSpec


class Qwen2Vl(NativeFamily):
    """`Qwen2VLForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_vl"
    media_tokens = {
        "image": MediaTokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        "video": MediaTokens("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    }
    media_defaults = {**IMAGE_LIMITS, **VIDEO_LIMITS}
    settings = {"image": IMAGE_SETTINGS, "video": VIDEO_SETTINGS}
    shrinkable = SHRINKABLE
    modules = ("vision", LLM)
    config_class = "Qwen2VLConfig"
    model_class = "Qwen2VLForConditionalGeneration"
    vision_type, text_type = "qwen2_vl_vision", "qwen2_vl_text"

    towers = {
        "vision": Tower(
            "model.visual",
            "native",
            0,
            "vision_config",
            "depth",
            "blocks",
            splits.QWEN2_VISION,
            projector=("merger",),
        )
    }
    decoder = Decoder("model.language_model", "lm_head", "vision", splits.QWEN2)

    def specs(self) -> tuple[ModuleSpec, ...]:
        return counts.qwen2_vision(self.vision), counts.decoder(self._text, tied=self._is_tied)
