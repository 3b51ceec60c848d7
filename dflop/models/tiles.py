"""How families that cut an image into tiles of one size choose the tile grid: from its header alone, in microseconds.

Both rules compare floating-point numbers for equality, so the order of operations matters: tests hold them equal to
the Hugging Face processors over drawn sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Size = tuple[int, int]
"""(height, width)."""


def best_resolution(size_px: Size, resolutions_px: Sequence[Size]) -> Size:
    """Of the resolutions, the one in which an image keeps most of its pixels, then the one that pads least.

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
