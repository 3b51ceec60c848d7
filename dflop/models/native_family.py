"""Native resolution: how the vision towers of the Qwen families take images and videos at nearly their own size.

A picture keeps its aspect ratio; both sides become multiples of `patch_px * merge`, and its area is brought between
two limits. `merge * merge` patches make one row for the LLM, two frames one temporal patch, in merge order.
`num_even_samples` follows Hugging Face's Qwen2-VL video processor, which Qwen2.5-VL and Qwen2.5-Omni use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models.arrays import patchify
from dflop.models.family import Family, Grid, Processor
from dflop.models.media import MediaHeader, MediaTokens, Placement
from dflop.records import MediaItem

MAX_ASPECT_RATIO = 200
TEMPORAL_PATCH_FRAMES = 2

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
VIDEO_SIZE: Mapping[str, str] = {"size.shortest_edge": "video_min_pixels", "size.longest_edge": "video_max_pixels"}
"""Entries of settings -> limits, as the classes of Qwen2-VL take them; areas are written as edges."""


class NativeFamily(Family):
    """Images and videos at nearly their own size; frames are sampled as Qwen2-VL's processor does.

    Pixels are per frame. `cap_pixels_per_frame` (off in transformers 5.23, announced to be switched on) also gives each
    frame no more than its share of 90 % of `max_video_tokens` rows, but never less than 1.05 times `video_min_pixels`.

    Raises:
        ConfigError: a media limit the family does not know, or attention windows that hold nothing.
    """

    media_tokens = {
        "image": MediaTokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        "video": MediaTokens("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    }
    processor = Processor(
        "Qwen2_5_VLProcessor",
        {"image": "Qwen2VLImageProcessor", "video": "Qwen2VLVideoProcessor"},
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )
    media_defaults: Mapping[str, Any] = {
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "video_fps": 2.0,
        "video_min_frames": 4,
        "video_max_frames": 768,
        "video_min_pixels": 28 * 28 * 128,
        "video_max_pixels": 28 * 28 * 768,
        "cap_pixels_per_frame": False,
        "max_video_tokens": 128_000,
    }
    settings: Mapping[str, Mapping[str, str]] = {
        "image": IMAGE_SETTINGS,
        "video": {**VIDEO_SIZE, "min_pixels": "video_min_pixels", "max_pixels": "video_max_pixels", **VIDEO_SAMPLING},
    }
    shrinkable: Mapping[str, int] = {
        "max_pixels": 56 * 56,
        "video_max_frames": 4,
        "video_min_pixels": 28 * 28,
        "video_max_pixels": 56 * 56,
    }

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        self.vision = c = self.configs["vision"]
        self.factor_px: int = c["patch_size"] * c["spatial_merge_size"]
        """What both sides of a resized frame are multiples of."""
        self._num_full_layers = len({i for i in c.get("fullatt_block_indexes", range(c["depth"])) if i < c["depth"]})
        if self._num_full_layers < c["depth"] and c.get("window_size", 0) < self.factor_px:
            raise ConfigError(
                f"a window of {c.get('window_size', 0)} px is less than a row of the encoder, {self.factor_px} px",
                where="model.hf_config.vision_config.window_size",
            )

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        limits, prefix, grid_t = self.limits(level), "" if header.kind == "image" else "video_", 1
        min_pixels, max_pixels = limits[f"{prefix}min_pixels"], limits[f"{prefix}max_pixels"]
        if header.kind == "video":
            num_sampled = num_even_samples(header.num_frames, header.duration_s, limits)
            if limits["cap_pixels_per_frame"]:
                budget = int(limits["max_video_tokens"] * self.factor_px**2 * 0.9)
                share = budget * TEMPORAL_PATCH_FRAMES // num_sampled
                max_pixels = max(min(max_pixels, share), int(min_pixels * 1.05))
            grid_t = num_sampled // TEMPORAL_PATCH_FRAMES
        size_px = smart_resize(header.height_px, header.width_px, self.factor_px, min_pixels, max_pixels)
        return self._place_patches(header.kind, grid_t, size_px)

    def _place_patches(self, kind: str, grid_t: int, size_px: tuple[int, int]) -> Placement:
        """Placement of `grid_t` temporal patches of frames resized to (height, width) `size_px`."""
        grid_h, grid_w = (px // self.vision["patch_size"] for px in size_px)
        num_tokens = grid_t * grid_h * grid_w
        num_rows = num_tokens // self.vision["spatial_merge_size"] ** 2
        return Placement(
            module="vision",
            grid=(grid_t, grid_h, grid_w),
            num_tokens=num_tokens,
            sum_sq_tokens=self._sum_sq_patches((grid_t, grid_h, grid_w)),
            num_rows=num_rows,
            layout=self.media_tokens[kind].wrap(num_rows),
        )

    def _sum_sq_patches(self, grid: Grid) -> int:
        """Sum of squared attention lengths, averaged over layers that span a frame and those with windows."""
        grid_t, grid_h, grid_w = grid
        num_layers: int = self.vision["depth"]
        sum_sq = self._num_full_layers * (grid_h * grid_w) ** 2
        if self._num_full_layers < num_layers:
            side: int = self.vision["window_size"] // self.factor_px * self.vision["spatial_merge_size"]
            sum_sq += (num_layers - self._num_full_layers) * sum_sq_cut(grid_h, side) * sum_sq_cut(grid_w, side)
        return round(grid_t * sum_sq / num_layers)

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        """First frame of each of so many equal intervals.

        Hugging Face computes the same in floating point: for about one pair of numbers in twenty that yields one more
        index, just past the video, which is left out here; in videos of more than 32 000 frames it may round one up.
        """
        num_sampled = num_even_samples(num_frames, duration_s, self.limits(level))
        return tuple(i * num_frames // num_sampled for i in range(num_sampled))

    def fixed_settings(self, kind: str) -> Mapping[str, Any]:
        sampling = {"num_frames": None, "do_sample_frames": True} if kind == "video" else {}
        return {
            **super().fixed_settings(kind),
            **sampling,
            "patch_size": self.vision["patch_size"],
            "merge_size": self.vision["spatial_merge_size"],
            "temporal_patch_size": self.vision["temporal_patch_size"],
            **self.towers["vision"].colour_settings,
        }

    def frame_sizes_px(self, item: MediaItem, level: int = 0) -> tuple[tuple[int, int], ...]:
        return ((item.grid[1] * self.vision["patch_size"], item.grid[2] * self.vision["patch_size"]),)

    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        c = self.vision
        return grid[0] * grid[1] * grid[2], c["in_channels"] * c["temporal_patch_size"] * c["patch_size"] ** 2

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        return patchify(
            versions[0],
            item.grid,
            patch_px=self.vision["patch_size"],
            merge=self.vision["spatial_merge_size"],
            temporal_patch=self.vision["temporal_patch_size"],
        )

    def sum_sq_tokens(self, item: MediaItem) -> int:
        return self._sum_sq_patches(item.grid) if item.module == "vision" else item.sum_sq_tokens

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {
            "image_token_id": token_id["<|image_pad|>"],
            "video_token_id": token_id["<|video_pad|>"],
            "vision_start_token_id": token_id["<|vision_start|>"],
            "vision_end_token_id": token_id["<|vision_end|>"],
        }

    def shallow_entries(self, module: str, num_layers: int) -> dict[str, Any]:
        entries = super().shallow_entries(module, num_layers)
        full = self.configs[module].get("fullatt_block_indexes")
        if full is not None:
            # The last layer of a probe keeps full attention, so that two depths see both kinds where the model has
            # both.
            every_layer_full = len(full) >= self.configs[module]["depth"]
            entries["fullatt_block_indexes"] = list(range(num_layers)) if every_layer_full else [num_layers - 1]
        return entries


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
        ValueError: one side is more than 200 times the other.
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
        ValueError: one side is more than 200 times the other.
    """
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
