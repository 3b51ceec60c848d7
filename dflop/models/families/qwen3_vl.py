"""Qwen3-VL: a native-resolution vision tower that attends over whole frames, feeding a Qwen3 decoder.

Images and videos follow the Hugging Face processors exactly (tests hold them equal). Unlike its predecessors it
samples frames evenly from the first to the last, has one pixel budget for all frames of a video, and writes a video as
one run of rows per temporal patch, each after the time it is at: `<0.3 seconds><|vision_start|>...<|vision_end|>`.
Transformers 5.23 puts that for the pad of the published template and leaves the template's own pair around it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dflop.models import counts
from dflop.models.family import Decoder, Tower
from dflop.models.media import Layout, MediaHeader, Placement
from dflop.models.native_family import (
    IMAGE_SETTINGS,
    TEMPORAL_PATCH_FRAMES,
    VIDEO_SAMPLING,
    VIDEO_SIZE,
    NativeFamily,
    check_aspect_ratio,
    smart_resize,
)
from dflop.models.pixels import HALF
from dflop.records import LLM, ModuleSpec

ASSUMED_FPS = 24.0
"""Frame rate of a video that states none."""


class Qwen3Vl(NativeFamily):
    """`Qwen3VLForConditionalGeneration`; media limits as in `media_defaults`.

    `video_min_pixels` and `video_max_pixels` bound the pixels of all sampled frames together. `cap_pixels_per_frame`
    (off in transformers 5.23, announced to be switched on) also keeps each frame to `max_video_tokens` rows, and lets
    it have 1.05 times `video_min_pixels` however many frames there are.
    """

    name = "qwen3_vl"
    media_defaults = {
        **NativeFamily.media_defaults,
        "video_min_pixels": 32 * 32 * 128,
        "video_max_pixels": 32 * 32 * 768,
        "max_video_tokens": 768,
    }
    settings = {"image": IMAGE_SETTINGS, "video": {**VIDEO_SIZE, **VIDEO_SAMPLING}}
    shrinkable = {
        **NativeFamily.shrinkable,
        "video_min_pixels": 32 * 32 * 4,
        "video_max_pixels": 32 * 32 * 4,
    }
    processor = replace(
        NativeFamily.processor,
        whole="Qwen3VLProcessor",
        parts={"image": "Qwen2VLImageProcessor", "video": "Qwen3VLVideoProcessor"},
    )
    section_types = {"vision": "qwen3_vl_vision", LLM: "qwen3_vl_text"}
    towers = {
        "vision": Tower("model.visual", "native", "blocks", projector=("merger", "deepstack_merger_list"), colours=HALF)
    }

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        self.num_deep = len(self.vision["deepstack_visual_indexes"])
        self.decoder = Decoder(self.num_deep)

    def specs(self) -> tuple[ModuleSpec, ...]:
        # The layers that add deepstack features must all be on the first stage.
        tied = bool(self.hf_config.get("tie_word_embeddings", False))
        return counts.qwen3_vision(self.vision), counts.decoder(self._text, tied=tied, num_deep_features=self.num_deep)

    def shallow_entries(self, module: str, num_layers: int) -> dict[str, Any]:
        entries = super().shallow_entries(module, num_layers)
        if module == "vision":
            # All features from the last layer: as many mergers run at every depth as in the whole tower.
            entries["deepstack_visual_indexes"] = [num_layers - 1] * self.num_deep
        return entries

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        if header.kind != "video":
            return super()._place(header, num_images, level)
        limits, tokens = self.limits(level), self.media_tokens[header.kind]
        frames = _sample(header.num_frames, header.duration_s, limits)
        grid_t = math.ceil(len(frames) / TEMPORAL_PATCH_FRAMES)
        size_px = _resize_video(header.height_px, header.width_px, len(frames), self.factor_px, limits)
        placed = self._place_patches(header.kind, grid_t, size_px)
        fps = _frame_rate(header.num_frames, header.duration_s)
        patches = _layout(_pad(frames), fps, tokens.wrap(placed.num_rows // grid_t))
        return replace(placed, layout=(tokens.begin, *patches, tokens.end))

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        return tuple(_pad(_sample(num_frames, duration_s, self.limits(level))))


def _frame_rate(num_frames: int, duration_s: float) -> float:
    return num_frames / duration_s if 0 < duration_s < math.inf else ASSUMED_FPS


def _sample(num_frames: int, duration_s: float, limits: Mapping[str, Any]) -> list[int]:
    """Frames at equal distances, first and last included; an odd number is possible. A single frame is taken twice."""
    if num_frames == 1:
        return [0, 0]
    if num_frames < TEMPORAL_PATCH_FRAMES:
        raise ValueError(f"{num_frames} video frame(s); a temporal patch takes {TEMPORAL_PATCH_FRAMES}")
    wanted = int(min(num_frames / _frame_rate(num_frames, duration_s) * limits["video_fps"], num_frames))
    num_sampled = min(max(wanted, limits["video_min_frames"]), limits["video_max_frames"], num_frames)
    if num_sampled < TEMPORAL_PATCH_FRAMES:
        raise ValueError(f"{num_frames} frames in {duration_s:g} s leave {num_sampled} after sampling")
    frames: list[int] = np.linspace(0, num_frames - 1, num_sampled).round().astype(int).tolist()
    return frames


def _pad(frames: list[int]) -> list[int]:
    """Fill up the last temporal patch with the last frame."""
    return frames + frames[-1:] * (-len(frames) % TEMPORAL_PATCH_FRAMES)


def _layout(frames: list[int], fps: float, rows_of_patch: Layout) -> Layout:
    """Every temporal patch after the mean time of its first and last frame, to a tenth of a second."""
    times_s = [frame / fps for frame in frames]
    pairs = zip(
        times_s[::TEMPORAL_PATCH_FRAMES], times_s[TEMPORAL_PATCH_FRAMES - 1 :: TEMPORAL_PATCH_FRAMES], strict=True
    )
    return tuple(part for first, last in pairs for part in (f"<{(first + last) / 2:.1f} seconds>", *rows_of_patch))


def _resize_video(
    height_px: int, width_px: int, num_sampled: int, factor_px: int, limits: Mapping[str, Any]
) -> tuple[int, int]:
    """(height, width) of every frame, such that all frames together stay within the pixel limits."""
    min_pixels, max_pixels = limits["video_min_pixels"], limits["video_max_pixels"]
    if limits["cap_pixels_per_frame"]:
        of_frame = min(limits["max_video_tokens"] * factor_px**2, max_pixels // num_sampled)
        max_pixels = max(of_frame, int(min_pixels * 1.05)) * num_sampled
    scale = max(1.0, factor_px / min(height_px, width_px))  # no side below one row
    check_aspect_ratio(height_px, width_px, scale)
    # Rounded half to even, so an odd number of frames counts as one more or one less.
    num_counted = round(num_sampled / TEMPORAL_PATCH_FRAMES) * TEMPORAL_PATCH_FRAMES
    return smart_resize(
        int(height_px * scale), int(width_px * scale), factor_px, min_pixels, max_pixels, num_frames=num_sampled,
        num_counted=num_counted,
    )  # fmt: skip
