"""What families share that cut images into square tiles: the tower takes every tile as a separate sequence.

The grid of tiles follows from an image's header alone, in microseconds. Both rules compare floating-point numbers for
equality, so the order of operations matters: tests hold them equal to the Hugging Face processors over drawn sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models.arrays import tile_pixels
from dflop.models.family import Family, Grid
from dflop.models.media import Layout, Placement
from dflop.records import MediaItem

Size = tuple[int, int]
"""(height, width)."""


class TiledFamily(Family):
    """Tiles of images and frames of videos; `video_frames` limits the latter.

    A family sets what follows when it is bound to its configuration.
    """

    tile_px: int
    """Side of a tile."""
    side: int
    """Patches along it."""
    shrinkable: Mapping[str, int] = {"max_tiles": 1, "video_frames": 1}
    num_class_tokens = 0
    """Positions of a tile that are no patches and give no rows."""

    def fixed_settings(self, kind: str) -> Mapping[str, Any]:
        frames = {"fps": None, "do_sample_frames": True} if kind == "video" else {}
        return {
            **super().fixed_settings(kind),
            **frames,
            "size": {"height": self.tile_px, "width": self.tile_px},
            **self.towers["vision"].colour_settings,
        }

    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        return grid[0], self.configs["vision"]["num_channels"], self.tile_px, self.tile_px

    def frame_sizes_px(self, item: MediaItem, level: int = 0) -> tuple[Size, ...]:
        return ((self.tile_px, self.tile_px),)

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        return tile_pixels(versions[0])

    def _check_least(self, least: Mapping[str, int]) -> None:
        """Refuse media limits below what the family can do.

        Raises:
            ConfigError: a limit is lower.
        """
        for key, value in least.items():
            if self.media[key] < value:
                raise ConfigError(f"{key} = {self.media[key]} is less than {value}", where=f"model.media.{key}")

    def _num_sampled(self, num_frames: int, level: int) -> int:
        """Frames of a video that are taken.

        Raises:
            ValueError: it has none.
        """
        if num_frames < 1:
            raise ValueError("video has no frames")
        return min(num_frames, int(self.limits(level)["video_frames"]))

    def _place_tiles(self, num_tiles: int, num_rows: int, layout: Layout) -> Placement:
        tile_tokens = self.side**2 + self.num_class_tokens
        return Placement(
            module="vision",
            grid=(num_tiles, self.side, self.side),
            num_tokens=num_tiles * tile_tokens,
            sum_sq_tokens=num_tiles * tile_tokens**2,
            num_rows=num_rows,
            layout=layout,
        )


def best_resolution(size_px: Size, resolutions_px: Sequence[Size]) -> Size:
    """The resolution in which an image keeps most of its pixels, then the one that pads least.

    The image is scaled to fit inside a resolution with its aspect ratio kept; pixels gained by enlarging do not count.
    The first of equals wins.
    """
    height_px, width_px = size_px
    image_px = height_px * width_px

    def rank(resolution_px: Size) -> tuple[int, int]:
        height, width = resolution_px
        scale = min(width / width_px, height / height_px)
        kept_px = min(int(width_px * scale) * int(height_px * scale), image_px)
        return kept_px, kept_px - height * width

    return max(resolutions_px, key=rank)


def closest_grid(size_px: Size, tile_px: int, min_tiles: int, max_tiles: int) -> Size:
    """The (rows, columns) of at least `min_tiles` and at most `max_tiles` tiles closest to an image's aspect ratio.

    Of equally close grids, the largest whose pixels are less than twice the image's, or else the smallest.
    """
    height_px, width_px = size_px
    grids = _grids(min_tiles, max_tiles)
    distances = [abs(width_px / height_px - ratio) for ratio, _ in grids]
    closest = min(distances)
    tied = [grid for (_, grid), distance in zip(grids, distances, strict=True) if distance == closest]
    limit_px = 2 * height_px * width_px
    return next((grid for grid in reversed(tied) if grid[0] * grid[1] * tile_px**2 < limit_px), tied[0])


@lru_cache
def _grids(min_tiles: int, max_tiles: int) -> list[tuple[float, Size]]:
    """Aspect ratio (width / height) and (rows, columns) of every grid: few tiles first, then tall before wide."""
    columns_rows = [(c, r) for c in range(1, max_tiles + 1) for r in range(1, max_tiles // c + 1) if c * r >= min_tiles]
    return [(c / r, (r, c)) for c, r in sorted(columns_rows, key=lambda grid: grid[0] * grid[1])]
