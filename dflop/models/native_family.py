"""What the native-resolution Qwen families have in common: one vision tower over patches in merge order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models.arrays import patchify
from dflop.models.family import Family, Grid
from dflop.models.media import MediaHeader, MediaTokens, Placement
from dflop.models.native import (
    IMAGE_LIMITS,
    IMAGE_SETTINGS,
    SHRINKABLE,
    TEMPORAL_PATCH_FRAMES,
    VIDEO_LIMITS,
    VIDEO_SETTINGS,
    num_even_samples,
    smart_resize,
    sum_sq_cut,
)
from dflop.records import MediaItem


class NativeFamily(Family):
    """Images and videos at nearly their own size; frames are sampled as Qwen2-VL's processor does.

    Raises:
        ConfigError: a media limit the family does not know, or attention windows that hold nothing.
    """

    media_tokens = {
        "image": MediaTokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        "video": MediaTokens("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    }
    media_defaults = {**IMAGE_LIMITS, **VIDEO_LIMITS}
    settings = {"image": IMAGE_SETTINGS, "video": VIDEO_SETTINGS}
    shrinkable = SHRINKABLE

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
