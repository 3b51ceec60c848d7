"""Native resolution: how the vision towers of the Qwen families take images and videos at nearly their own size.

A picture keeps its aspect ratio; both sides become multiples of `patch_px * merge`, and its area is brought between
two limits. `merge * merge` patches make one row for the LLM, two frames one temporal patch. `num_even_samples`
follows Hugging Face's Qwen2-VL video processor, which Qwen2.5-VL and Qwen2.5-Omni use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_ASPECT_RATIO = 200
TEMPORAL_PATCH_FRAMES = 2

IMAGE_LIMITS: Mapping[str, Any] = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
VIDEO_LIMITS: Mapping[str, Any] = {
    "video_fps": 2.0,
    "video_min_frames": 4,
    "video_max_frames": 768,
    "video_min_pixels": 28 * 28 * 128,
    "video_max_pixels": 28 * 28 * 768,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 128_000,
}
"""Pixels are per frame. `cap_pixels_per_frame` (off in transformers 5.23, announced to be switched on) also gives each
frame no more than its share of 90 % of `max_video_tokens` rows, but never less than 1.05 times `video_min_pixels`."""
IMAGE_SETTINGS: Mapping[str, str] = {
    "size.shortest_edge": "min_pixels",
    "size.longest_edge": "max_pixels",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
}
VIDEO_SAMPLING: Mapping[str, str] = {
    "fps": "video_fps",
    "min_frames": "video_min_frames",
    "max_frames": "video_max_frames",
    "cap_pixels_per_frame": "cap_pixels_per_frame",
    "max_video_tokens": "max_video_tokens",
}
VIDEO_SIZE: Mapping[str, str] = {
    "size.shortest_edge": "video_min_pixels",
    "size.longest_edge": "video_max_pixels",
}
VIDEO_SETTINGS: Mapping[str, str] = {
    **VIDEO_SIZE,
    "min_pixels": "video_min_pixels",
    "max_pixels": "video_max_pixels",
    **VIDEO_SAMPLING,
}
"""Entries of settings -> limits, as the classes of Qwen2-VL take them; areas are written as edges."""
SHRINKABLE: Mapping[str, int] = {
    "max_pixels": 56 * 56,
    "video_max_frames": 4,
    "video_min_pixels": 28 * 28,
    "video_max_pixels": 56 * 56,
}


def smart_resize(
    height_px: int, width_px: int, factor_px: int, min_pixels: int, max_pixels: int, *, num_frames: int = 1,
    num_counted: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """(height, width) of a picture resized to multiples of `factor_px` with an area between the limits.

    Args:
        height_px: Of the picture.
        width_px: Of the picture.
        factor_px: What both sides become multiples of.
        min_pixels: Of all frames together.
        max_pixels: Of all frames together.
        num_frames: By which a size out of the limits is scaled.
        num_counted: As how many frames these count where it is decided whether a size is out of the limits.

    Raises:
        ValueError: empty, or one side more than 200 times the other.
    """
    check_aspect_ratio(height_px, width_px)
    height = round(height_px / factor_px) * factor_px
    width = round(width_px / factor_px) * factor_px
    if num_counted * height * width > max_pixels:
        shrink = math.sqrt(num_frames * height_px * width_px / max_pixels)
        height = max(factor_px, math.floor(height_px / shrink / factor_px) * factor_px)
        width = max(factor_px, math.floor(width_px / shrink / factor_px) * factor_px)
    elif num_counted * height * width < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height_px * width_px))
        height = math.ceil(height_px * grow / factor_px) * factor_px
        width = math.ceil(width_px * grow / factor_px) * factor_px
    return height, width


def check_aspect_ratio(height_px: int, width_px: int, scale: float = 1.0) -> None:
    """Refuse what no native-resolution processor takes; the ratio is that of the sides scaled to whole pixels.

    Raises:
        ValueError: empty, or one side more than 200 times the other.
    """
    if min(height_px, width_px) < 1:
        raise ValueError(f"size {width_px}x{height_px} is empty")
    height, width = int(height_px * scale), int(width_px * scale)
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"aspect ratio of {width_px}x{height_px} exceeds {MAX_ASPECT_RATIO}")


def num_even_samples(num_frames: int, duration_s: float, limits: Mapping[str, Any]) -> int:
    """How many frames are taken of a video: `video_fps` per second, within the limits, whole temporal patches.

    A single frame is taken twice: Hugging Face's sampling fails on it, its padding of unsampled clips does that.

    Raises:
        ValueError: no frame, or no duration to take a rate of.
    """
    if num_frames == 1:
        return TEMPORAL_PATCH_FRAMES
    if num_frames < TEMPORAL_PATCH_FRAMES:
        raise ValueError(f"{num_frames} video frame(s); a temporal patch takes {TEMPORAL_PATCH_FRAMES}")
    if not 0 < duration_s < math.inf:
        raise ValueError(f"video of {num_frames} frames lasts {duration_s:g} s; no frame rate to sample from")
    # Through the frame rate, as Hugging Face computes it: the detour can cost the last bit, and with it two frames.
    wanted = num_frames / (num_frames / duration_s) * limits["video_fps"]
    most = min(limits["video_max_frames"], num_frames) // TEMPORAL_PATCH_FRAMES * TEMPORAL_PATCH_FRAMES
    num_sampled = int(min(max(wanted, limits["video_min_frames"]), most))
    num_sampled = num_sampled // TEMPORAL_PATCH_FRAMES * TEMPORAL_PATCH_FRAMES
    if num_sampled < TEMPORAL_PATCH_FRAMES:
        raise ValueError(f"{num_frames} frames in {duration_s:g} s leave {num_sampled} after sampling")
    return num_sampled


def sum_sq_cut(length: int, piece: int) -> int:
    """Sum of squared lengths of `length` cut into pieces of `piece` and a rest."""
    return length // piece * piece**2 + (length % piece) ** 2
