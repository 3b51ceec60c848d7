"""InternVL: a vision transformer over square tiles, pixel-shuffled to fewer rows, and a Qwen2 decoder.

An image is stretched onto the grid of tiles closest to its aspect ratio, with a thumbnail of the whole after them
where there is more than one tile; each frame of a video is one tile. Every tile is a sequence of its own in the tower,
its patches and a class token, and gives the same number of rows. Images, whether one or several in a sample, and the
text around frames follow the Hugging Face processor exactly (tests hold them equal), but that Hugging Face takes every
frame of a video unless told a number: here `video_frames` of them are taken as its sampler does, from the middle of
equal spans, with whole-number arithmetic where Hugging Face rounds to 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models import counts
from dflop.models.arrays import cut_tiles
from dflop.models.family import Processor, Tower, complete_section
from dflop.models.media import MIN_COUNT, Layout, MediaHeader, MediaTokens, Placement
from dflop.models.pixels import IMAGENET
from dflop.models.tiled_family import Size, TiledFamily, closest_grid
from dflop.records import LLM, MediaItem, ModuleSpec

_DEFAULTS = {"downsample_ratio": 0.5, "vision_feature_select_strategy": "default"}


class InternVl(TiledFamily):
    """`InternVLForConditionalGeneration`; media limits as in `media_defaults`.

    `min_tiles` and `max_tiles` bound the tiles of an image, the thumbnail not counted.

    Raises:
        ConfigError: a `hf_config` the Hugging Face model cannot run, or limits that leave nothing.
    """

    name = "internvl"
    media_tokens = {
        "image": MediaTokens("<img>", "<IMG_CONTEXT>", "</img>", placeholder="<IMG_CONTEXT>"),
        "video": MediaTokens("<img>", "<IMG_CONTEXT>", "</img>", placeholder="<video>"),
    }
    media_defaults = {"min_tiles": 1, "max_tiles": 12, "video_frames": 32}
    settings = {
        "image": {"min_patches": "min_tiles", "max_patches": "max_tiles"},
        "video": {"num_frames": "video_frames"},
    }
    num_class_tokens = 1
    processor = Processor(
        "InternVLProcessor",
        {"image": "GotOcr2ImageProcessor", "video": "InternVLVideoProcessor"},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )
    section_types = {LLM: "qwen2"}
    towers = {
        "vision": Tower(
            "model.vision_tower", "tiles", "encoder.layer", extras=("model.multi_modal_projector",), colours=IMAGENET
        )
    }

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        sides = ("image_size", "patch_size")
        vision = complete_section(hf_config.get("vision_config"), "vision_config", "internvl_vision", sides=sides)
        vision |= {key: _square(vision, key) for key in sides}
        self.configs = {"vision": vision, **self.configs}
        self.tile_px: int = vision["image_size"]
        self.side = self.tile_px // int(vision["patch_size"])
        self.rows_per_tile = _rows_per_tile(self.side, {**_DEFAULTS, **self.hf_config})
        self.shrinkable = {**self.shrinkable, "max_tiles": self.media["min_tiles"]}
        self._check_least({"min_tiles": 1, **self.shrinkable})

    def processor_entries(self) -> Mapping[str, Any]:
        return {"image_seq_length": self.rows_per_tile}

    def specs(self) -> tuple[ModuleSpec, ...]:
        vision, text = self.configs["vision"], self._text
        width = vision["hidden_size"] * self.side**2 // self.rows_per_tile
        projector = (width, text["hidden_size"], text["hidden_size"])
        # Hugging Face ties this family's embeddings unless the top of the config says otherwise.
        tied = bool(self.hf_config.get("tie_word_embeddings", True))
        return counts.internvit(vision, projector), counts.decoder(text, tied=tied)

    def frame_sizes_px(self, item: MediaItem, level: int = 0) -> tuple[Size, ...]:
        tile = super().frame_sizes_px(item, level)
        if item.kind != "image" or item.grid[0] == 1:
            return tile
        rows, columns = self._tile_grid((item.height_px, item.width_px), level)
        return (rows * self.tile_px, columns * self.tile_px), *tile

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        if len(versions) == 1:
            return super().array_of(item, versions)
        tiles, thumbnail = cut_tiles(versions[0][0], self.tile_px), versions[1]
        return super().array_of(item, [np.concatenate([tiles, thumbnail])])

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {"image_token_id": token_id["<IMG_CONTEXT>"]}

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        if header.kind == "video":
            num_tiles = self._num_sampled(header.num_frames, level)
            return self._place_tiles(num_tiles, num_tiles * self.rows_per_tile, self._frames_layout(num_tiles))
        rows, columns = self._tile_grid((header.height_px, header.width_px), level)
        num_tiles = rows * columns + (rows * columns > 1)
        num_rows = num_tiles * self.rows_per_tile
        return self._place_tiles(num_tiles, num_rows, self.media_tokens[header.kind].wrap(num_rows))

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        num_sampled = self._num_sampled(num_frames, level)
        return tuple((2 * i + 1) * num_frames // (2 * num_sampled) for i in range(num_sampled))

    def _tile_grid(self, size_px: Size, level: int) -> Size:
        """(rows, columns) of an image's tiles."""
        limits = self.limits(level)
        return closest_grid(size_px, self.tile_px, limits["min_tiles"], limits["max_tiles"])

    def _frames_layout(self, num_frames: int) -> Layout:
        """Every frame wrapped like an image of one tile, numbered from 1, one to a line."""
        frame = self.media_tokens["video"].wrap(self.rows_per_tile)
        return tuple(part for i in range(num_frames) for part in (("\n" if i else "") + f"Frame{i + 1}: ", *frame))


def _square(vision: Mapping[str, Any], key: str) -> int:
    """Side in pixels of what a vision config gives as one number or as (height, width)."""
    value = vision[key]
    height_px, width_px = (value, value) if isinstance(value, int) else value
    if height_px != width_px:
        raise ConfigError(f"{key} of {height_px}x{width_px} px is not square", where="model.hf_config.vision_config")
    return int(height_px)


def _rows_per_tile(side: int, config: Mapping[str, Any]) -> int:
    """Rows a tile of `side` x `side` patches gives after the pixel shuffle."""
    ratio, select = config["downsample_ratio"], config["vision_feature_select_strategy"]
    is_ratio = isinstance(ratio, int | float) and ratio > MIN_COUNT
    merge = max(1, round(1 / ratio)) if is_ratio else 1
    if side < 1 or not is_ratio or merge * ratio != 1 or side % ratio or side % merge:
        raise ConfigError(
            f"downsample_ratio = {ratio} does not divide a tile of {side}x{side} patches",
            where="model.hf_config.downsample_ratio",
            hint="1 over a power of two that divides vision_config.image_size / patch_size",
        )
    if select != "default":
        raise ConfigError(
            f"vision_feature_select_strategy `{select}` keeps the class token, which cannot be pixel-shuffled",
            where="model.hf_config.vision_feature_select_strategy",
            hint="`default`",
        )
    return int(side // merge) ** 2
