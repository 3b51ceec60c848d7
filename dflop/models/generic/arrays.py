"""Media items of any model as one array each: what its processor makes of the item, without what follows from its size.

- `grid`: patches of pictures or clips of any size, `[patches, values]`; the grid (temporal, height, width) in patches;
- `sized`: a picture of any size, flat, since pictures of several sizes have no other common axis;
- `tiles`: tiles of one size, `[tiles, 3, height, width]`;
- `listed tiles`: the same, with one more axis in front of it for the model, and a mask of padding that must be full.

Grids of the last three are (tiles, height, width) in pixels. Nothing here needs torch, as the workers that decode media
import it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflop.errors import ConfigError

GRID, SIZED, TILES, LISTED = "grid", "sized", "tiles", "listed tiles"
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Media kind -> argument of models."""
Grid = tuple[int, int, int]


def form_of(kind: str, made: Mapping[str, Any]) -> str:
    """In which form a processor makes items of a kind.

    Args:
        kind: `image` or `video`.
        made: What the processor makes of one item.

    Raises:
        ConfigError: in another form.
    """
    pixels = made.get(PIXELS.get(kind, ""))
    if pixels is not None and f"{kind}_grid_thw" in made and pixels.ndim == 2:
        return GRID
    if kind == "image" and pixels is not None:
        if "image_sizes" in made and pixels.ndim == 4 and len(pixels) == 1:
            return SIZED
        if "pixel_attention_mask" in made and pixels.ndim == 5:
            return LISTED
        if "image_sizes" not in made and pixels.ndim == 4:
            return TILES
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in made.items() if hasattr(x, "shape"))
    raise ConfigError(f"items of kind {kind} come in a form that is not known: {shapes}", where="model.processor")


def grid_of(kind: str, made: Mapping[str, Any]) -> Grid:
    """The grid of an item; `made` may have pixels without values."""
    form = form_of(kind, made)
    if form == GRID:
        frames, height, width = (int(n) for n in made[f"{kind}_grid_thw"][0])
        return frames, height, width
    if form == SIZED:
        height, width = (int(n) for n in made["image_sizes"][0])
        return 1, height, width
    *_, tiles, _, height, width = made[PIXELS[kind]].shape
    return int(tiles), int(height), int(width)


def array_of(kind: str, made: Mapping[str, Any]) -> np.ndarray:
    """The array of an item.

    Raises:
        ValueError: a part of its pixels is padding.
    """
    form, pixels = form_of(kind, made), np.asarray(made[PIXELS[kind]])
    if form == SIZED:
        _, height, width = grid_of(kind, made)
        return np.ascontiguousarray(pixels[0, :, :height, :width]).reshape(-1)
    if form == LISTED:
        if not np.asarray(made["pixel_attention_mask"]).all():
            raise ValueError("a part of its pixels is padding")
        return np.asarray(pixels[0])
    return pixels


def array_shape(form: str, num_values: int, grid: Grid) -> tuple[int, ...]:
    """Shape of the array of an item.

    Args:
        form: Of the model's items.
        num_values: Of a patch of a grid.
        grid: Of the item.
    """
    if form == GRID:
        return math.prod(grid), num_values
    number, height, width = grid
    return (3 * height * width,) if form == SIZED else (number, 3, height, width)
