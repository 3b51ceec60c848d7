"""Qwen2.5-VL: a native-resolution vision tower with windowed attention feeding a Qwen2.5 decoder.

Images and videos follow the Hugging Face processors exactly (tests hold them equal), for videos with
`do_sample_frames`: two frames a second, the rate of the published models, where the processor's class has none. The
rules themselves are in `native.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflop.models.media import MediaRules, MediaTokens, Placement
from dflop.models.native import IMAGE_LIMITS, SHRINKABLE, VIDEO_LIMITS, NativeVision, sample_evenly

_VISION = {
    "depth": 32, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}  # fmt: skip


class Qwen25Vl(MediaRules):
    """`Qwen2_5_VLForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_5_vl"
    media_tokens = {
        "image": MediaTokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        "video": MediaTokens("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    }
    media_defaults = {**IMAGE_LIMITS, **VIDEO_LIMITS}
    shrinkable = SHRINKABLE

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        self.vision = {**_VISION, **self.hf_config.get("vision_config", {})}
        self._native = NativeVision.of(self.vision)

    def place(
        self,
        kind: str,
        *,
        width_px: int,
        height_px: int,
        num_frames: int,
        duration_s: float,
        num_images: int = 1,
        level: int = 0,
    ) -> Placement:
        if kind not in self.media_tokens:
            raise ValueError(f"{self.name} takes no {kind}")
        limits, tokens = self.limits(level), self.media_tokens[kind]
        if kind == "image":
            return self._native.place_image(width_px, height_px, limits, tokens)
        return self._native.place_video(width_px, height_px, num_frames, duration_s, limits, tokens)

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        return sample_evenly(num_frames, duration_s, self.limits(level))
