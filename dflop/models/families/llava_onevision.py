"""LLaVA-OneVision: a SigLIP tower over tiles of one size, whose rows keep the picture's shape, and a Qwen2 decoder.

The only image of a sample is fitted into the best of a list of resolutions, cut into tiles and shown once more as a
whole (the base tile). Rows are the base tile's patches, then the patches of the fitted image without its padding, with
a newline row after each line of patches; above `vision_aspect_ratio` tiles' worth the lines are scaled down. Each of
several images is one tile, and a video is one tile per frame, pooled 2 x 2. All of it follows the Hugging Face
processor and model exactly (tests hold them equal), but that Hugging Face takes every frame of a video it is given:
here `video_frames` of them are taken evenly from the first to the last, as LLaVA's own loader does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models import counts
from dflop.models.arrays import cut_tiles, pad_frame
from dflop.models.family import Processor, Tower, complete_section
from dflop.models.media import MediaHeader, MediaTokens, Placement, check_like
from dflop.models.pixels import HALF
from dflop.models.tiled_family import Size, TiledFamily, best_resolution
from dflop.records import LLM, MediaItem, ModuleSpec

_NO_VISION_CONFIG = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
"""Where there is no `vision_config`; what one leaves out has the tower's own defaults, not these."""
_PINPOINTS = [(384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)]
_DOWNSCALE_ABOVE = 1.1


class LlavaOnevision(TiledFamily):
    """`LlavaOnevisionForConditionalGeneration`; media limits as in `media_defaults`.

    `max_tiles` drops the resolutions of `image_grid_pinpoints` that have more tiles (the base tile not counted);
    where the configuration is silent, none is dropped.

    Raises:
        ConfigError: a `hf_config` the Hugging Face model cannot run, or a limit that leaves nothing.
    """

    name = "llava_onevision"
    media_tokens = {"image": MediaTokens("", "<image>", ""), "video": MediaTokens("", "<video>", "")}
    media_defaults: Mapping[str, Any] = {"max_tiles": 36, "video_frames": 32}
    settings = {"video": {"num_frames": "video_frames"}}
    processor = Processor(
        "LlavaOnevisionProcessor",
        {"image": "LlavaOnevisionImageProcessor", "video": "LlavaOnevisionVideoProcessor"},
        {"image_token": "<image>", "video_token": "<video>"},
    )
    section_types = {LLM: "qwen2"}
    towers = {
        "vision": Tower(
            "model.vision_tower",
            "anyres",
            "encoder.layers",
            extras=("model.multi_modal_projector", "model.image_newline"),
            colours=HALF,
        )
    }

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        stated = hf_config.get("vision_config")
        vision = complete_section(
            _NO_VISION_CONFIG if stated is None else stated, "vision_config", "siglip_vision_model"
        )
        self.side = _side(vision, str(hf_config.get("vision_feature_select_strategy", "full")))
        self.tile_px: int = vision["image_size"]
        self.whole_tiles = _whole_tiles(str(hf_config.get("vision_aspect_ratio", "anyres_max_9")))
        self._tiles = _tile_counts(hf_config.get("image_grid_pinpoints"), self.tile_px)
        self.media_defaults = {**self.media_defaults, "max_tiles": max(self._tiles.values())}
        self.shrinkable = {**self.shrinkable, "max_tiles": min(self._tiles.values())}
        super().__init__(hf_config, media)
        self.configs = {"vision": vision, **self.configs}
        self._check_least(self.shrinkable)

    def fixed_settings(self, kind: str) -> Mapping[str, Any]:
        pinpoints = {"image_grid_pinpoints": list(self._tiles)} if kind == "image" else {}
        return {**super().fixed_settings(kind), **pinpoints}

    def processor_entries(self) -> Mapping[str, Any]:
        return {
            "num_image_tokens": self.side**2,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": f"anyres_max_{self.whole_tiles}",
        }

    def specs(self) -> tuple[ModuleSpec, ...]:
        vision, text = self.configs["vision"], self._text
        features = self.hf_config.get("vision_feature_layer", -1)
        if not all(
            isinstance(layer, int) for layer in (features if isinstance(features, list | tuple) else [features])
        ):
            raise ConfigError(f"`{features}` are no layers", where="model.hf_config.vision_feature_layer")
        width = vision["hidden_size"] * (1 if isinstance(features, int) else len(features))
        has_bias = bool(self.hf_config.get("multimodal_projector_bias", True))
        projector = (width, text["hidden_size"], text["hidden_size"])
        return counts.siglip(vision, projector, has_bias), counts.decoder(text, tied=self._is_tied)

    def item_size(self, item: MediaItem) -> tuple[int, ...]:
        """(tiles, height, width, fitted height, fitted width), all but the first in pixels.

        The latter two are 0 for one of several images, all four are 0 for a video.
        """
        num_tiles, size_px = item.grid[0], (item.height_px, item.width_px)
        if item.kind == "video":
            return num_tiles, 0, 0, 0, 0
        return num_tiles, *size_px, *(self._fitted_px(item) or (0, 0))

    def num_features(self, item: MediaItem) -> int:
        return item.grid[0] * self.side**2

    def framed(self, item: MediaItem, media: np.ndarray) -> np.ndarray:
        """One of several images becomes a square on a ground of the mean colour."""
        if item.kind == "video" or self._fitted_px(item) is not None:
            return media
        side = max(item.height_px, item.width_px)
        return np.stack(
            [pad_frame(frame, (side, side), tuple(int(255 * mean) for mean in HALF.mean)) for frame in media]
        )

    def frame_sizes_px(self, item: MediaItem, level: int = 0) -> tuple[Size, ...]:
        tile, fitted = super().frame_sizes_px(item, level), self._fitted_px(item)
        return tile if fitted is None else (*tile, _inside((item.height_px, item.width_px), fitted))

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        fitted = self._fitted_px(item)
        if fitted is None:
            return super().array_of(item, versions)
        whole, inside = versions
        tiles = cut_tiles(pad_frame(inside[0], fitted), self.tile_px)
        return super().array_of(item, [np.concatenate([whole, tiles])])

    def _fitted_px(self, item: MediaItem) -> Size | None:
        """The resolution that the only image of a sample is fitted into; None for videos and one of several images."""
        num_tiles = item.grid[0]
        if item.kind == "video" or num_tiles == 1:
            return None
        # Tile limits leave a resolution out or keep it by its tiles alone: the best of as many tiles is the one chosen.
        of_as_many = [p for p, n in self._tiles.items() if n == num_tiles - 1]
        return best_resolution((item.height_px, item.width_px), of_as_many)

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {"image_token_index": token_id["<image>"], "video_token_index": token_id["<video>"]}

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        if header.kind == "video":
            num_tiles = self._num_sampled(header.num_frames, level)
            num_rows = num_tiles * math.ceil(self.side / 2) ** 2 + 1
        elif num_images > 1:
            num_tiles, num_rows = 1, self.side**2 + 1
        else:
            size_px = header.height_px, header.width_px
            max_tiles = self.limits(level)["max_tiles"]
            fitted = best_resolution(size_px, [p for p, n in self._tiles.items() if n <= max_tiles])
            num_tiles = self._tiles[fitted] + 1
            num_rows = self.side**2 + self._num_fitted_rows(size_px, fitted)
        return self._place_tiles(num_tiles, num_rows, self.media_tokens[header.kind].wrap(num_rows))

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        indices = np.linspace(0, num_frames - 1, self._num_sampled(num_frames, level), dtype=int)
        return tuple(indices.tolist())

    def _num_fitted_rows(self, size_px: Size, fitted_px: Size) -> int:
        """Rows of an image fitted into a resolution: patches of its lines without padding, and a newline per line."""
        height_px, width_px = size_px
        lines, columns = (self.side * (px // self.tile_px) for px in fitted_px)
        # Padding is dropped in pairs of lines or columns, so one line of it can stay.
        if width_px / height_px > columns / lines:
            lines -= (lines - int(round(height_px * (columns / width_px), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width_px * (lines / height_px), 7))) // 2 * 2
        shrink = math.sqrt(lines * columns / (self.whole_tiles * self.side**2))
        if shrink > _DOWNSCALE_ABOVE:
            lines, columns = int(lines // shrink), int(columns // shrink)
            if min(lines, columns) < 1:
                raise ValueError(f"{width_px}x{height_px} px are too narrow to scale to {self.whole_tiles} tiles")
        return lines * (columns + 1)


def _side(vision: Mapping[str, Any], select: str) -> int:
    """Patches along one side of a tile."""
    tile_px, patch_px = vision["image_size"], vision["patch_size"]
    if select != "full" or tile_px < patch_px:
        raise ConfigError(
            f"tiles of {tile_px} px in patches of {patch_px} px, features `{select}`: the model cannot run this",
            where="model.hf_config.vision_config",
            hint="patches that fit into the image, and vision_feature_select_strategy `full`",
        )
    return int(tile_px // patch_px)


def _inside(size_px: Size, fitted_px: Size) -> Size:
    """Size of an image that is scaled to fit into a resolution with its aspect ratio kept, as Hugging Face rounds."""
    (height_px, width_px), (height, width) = size_px, fitted_px
    if width / width_px < height / height_px:
        return min(math.ceil(height_px * (width / width_px)), height), width
    return height, min(math.ceil(width_px * (height / height_px)), width)


def _tile_counts(pinpoints: Sequence[Sequence[int]] | None, tile_px: int) -> dict[Size, int]:
    """Tiles of every resolution, the base tile not counted; of the family's own list for None."""
    where = "model.hf_config.image_grid_pinpoints"
    if not isinstance(pinpoints, list | tuple | None):
        raise ConfigError("no list of resolutions", where=where)
    for pair in pinpoints or ():
        check_like(pair, (), where)
        if len(pair) != 2:
            raise ConfigError("a resolution is a height and a width", where=where)
    counts = {(h, w): h * w // tile_px**2 for h, w in (_PINPOINTS if pinpoints is None else pinpoints)}
    if not counts or any(min(size) < 1 or size[0] % tile_px or size[1] % tile_px for size in counts):
        raise ConfigError(
            f"{list(counts)} are not whole numbers of tiles of {tile_px} px",
            where=where,
            hint="multiples of vision_config.image_size, which is 224 where a vision_config leaves it out",
        )
    return counts


def _whole_tiles(aspect_ratio: str) -> int:
    """The number in `anyres_max_<number>`."""
    number = aspect_ratio.removeprefix("anyres_max_")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            f"vision_aspect_ratio is `{aspect_ratio}`",
            where="model.hf_config.vision_aspect_ratio",
            hint="`anyres_max_` and a number of tiles from 1",
        )
    return int(number)
