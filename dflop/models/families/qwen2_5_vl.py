"""Qwen2.5-VL: a native-resolution vision tower with windowed attention feeding a Qwen2.5 decoder.

Images and videos follow the Hugging Face processors exactly (tests hold them equal), for videos with
`do_sample_frames`: two frames a second, the rate of the published models, where the processor's class has none. The
rules themselves are in `native.py`.
"""

from __future__ import annotations

from dflop.models import counts, splits
from dflop.models.family import Decoder, Tower
from dflop.models.media import MediaTokens
from dflop.models.native import IMAGE_LIMITS, IMAGE_SETTINGS, SHRINKABLE, VIDEO_LIMITS, VIDEO_SETTINGS
from dflop.models.native_family import NativeFamily
from dflop.models.pixels import CLIP
from dflop.records import LLM, ModuleSpec


class Qwen25Vl(NativeFamily):
    """`Qwen2_5_VLForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_5_vl"
    media_tokens = {
        "image": MediaTokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        "video": MediaTokens("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    }
    media_defaults = {**IMAGE_LIMITS, **VIDEO_LIMITS}
    settings = {"image": IMAGE_SETTINGS, "video": VIDEO_SETTINGS}
    shrinkable = SHRINKABLE
    modules = ("vision", LLM)
    config_class = "Qwen2_5_VLConfig"
    model_class = "Qwen2_5_VLForConditionalGeneration"
    vision_type, text_type = "qwen2_5_vl_vision", "qwen2_5_vl_text"

    towers = {
        "vision": Tower(
            "model.visual",
            "native",
            0,
            "vision_config",
            "depth",
            "blocks",
            splits.QWEN2_5_VISION,
            projector=("merger",),
            colours=CLIP,
        )
    }
    decoder = Decoder("model.language_model", "lm_head", "vision", splits.QWEN2)

    def specs(self) -> tuple[ModuleSpec, ...]:
        return counts.qwen2_5_vision(self.vision), counts.decoder(self._text, tied=self._is_tied)
