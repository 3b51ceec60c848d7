"""What the native-resolution Qwen families have in common: one vision tower over patches in merge order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflop.models.arrays import patchify
from dflop.models.family import Grid, TrainableFamily
from dflop.models.media import MediaSize, Placement
from dflop.models.native import NativeVision, sample_evenly
from dflop.records import LLM, MediaItem


class NativeFamily(TrainableFamily):
    """Images and videos at nearly their own size; frames are sampled as Qwen2-VL's processor does.

    Raises:
        ConfigError: a media limit the family does not know.
    """

    vision_type: str
    text_type: str
    """`model_type` of the sections where the configuration is silent."""

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        self.vision = self._section("vision_config", self.vision_type)
        self.configs = {"vision": self.vision, LLM: self._section("text_config", self.text_type)}
        self._native = NativeVision.of(self.vision)

    def _place(self, kind: str, size: MediaSize, level: int) -> Placement:
        limits, tokens = self.limits(level), self.media_tokens[kind]
        if kind == "image":
            return self._native.place_image(size.width_px, size.height_px, limits, tokens)
        return self._native.place_video(size, limits, tokens)

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        return sample_evenly(num_frames, duration_s, self.limits(level))

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

    def frame_size_px(self, grid: Grid) -> tuple[int, int]:
        return grid[1] * self.vision["patch_size"], grid[2] * self.vision["patch_size"]

    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        c = self.vision
        return grid[0] * grid[1] * grid[2], c["in_channels"] * c["temporal_patch_size"] * c["patch_size"] ** 2

    def item_array(self, kind: str, media: np.ndarray, grid: Grid) -> np.ndarray:
        return patchify(
            media,
            grid,
            patch_px=self.vision["patch_size"],
            merge=self.vision["spatial_merge_size"],
            temporal_patch=self.vision["temporal_patch_size"],
        )

    def sum_sq_tokens(self, item: MediaItem) -> int:
        return self._native.sum_sq_tokens(item.grid) if item.module == "vision" else item.sum_sq_tokens

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
