"""Media items of any model as one array each: what its processor makes of the item, without what follows from its size.

- `grid`: patches of pictures or clips of any size, `[patches, ...]`; the grid (temporal, height, width) in patches;
- `sized`: a picture of any size, flat, since pictures of several sizes have no other common axis;
- `tiles`: tiles of one size, `[tiles, 3, height, width]`;
- `listed tiles`: the same, with one more axis in front of it for the model, and a mask of padding that must be full;
- `parts`: all that the processor makes, flat, for towers that take one item at a time.

Grids of `sized` and tiles are (tiles, height, width) in pixels, of `parts` (1, frames of sound, numbers in the array).
Nothing here needs torch, as the workers that decode media import it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

GRID, SIZED, TILES, LISTED, PARTS = "grid", "sized", "tiles", "listed tiles", "parts"
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Media kind -> argument of models."""
Grid = tuple[int, int, int]
_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
NUM_BYTES = 4
"""Bytes of a whole number, and of the length of the header of `parts`; each byte is a number of the array."""


def form_of(kind: str, made: Mapping[str, Any]) -> str:
    """In which form a processor makes items of a kind.

    Args:
        kind: `image`, `video` or `audio`.
        made: What the processor makes of one item.
    """
    pixels = pixels_of(kind, made)
    grids = made.get(f"{kind}_grid_thw")
    if pixels is not None and grids is not None:
        is_whole = len(pixels) == math.prod(grids[0]) and "image_merge_sizes" not in made
        return GRID if is_whole else PARTS
    if kind != "audio" and pixels is not None:
        if "image_sizes" in made and pixels.ndim == 4 and len(pixels) == 1:
            return SIZED
        if "pixel_attention_mask" in made and pixels.ndim == 5:
            return LISTED
        if "image_sizes" not in made and pixels.ndim == 4:
            return TILES
    return PARTS


def pixels_of(kind: str, made: Mapping[str, Any]) -> Any:
    """Pixels of an item, None of a sound; frames of a clip come as tiles of a picture where a class takes them so."""
    return made.get(PIXELS.get(kind, ""), made.get("pixel_values") if kind == "video" else None)


def grid_of(form: str, kind: str, made: Mapping[str, Any]) -> Grid:
    """The grid of an item in a form; `made` may have floats without values."""
    if form == PARTS:
        head, arrays = _parts(kind, made)
        num = sum(math.prod(x.shape) * (1 if _is_float(x) else NUM_BYTES) for x in arrays.values())
        return 1, _num_frames(made) if kind == "audio" else 1, NUM_BYTES + len(head) + num
    if form == GRID:
        frames, height, width = (int(n) for n in made[f"{kind}_grid_thw"][0])
        return frames, height, width
    if form == SIZED:
        height, width = (int(n) for n in made["image_sizes"][0])
        return 1, height, width
    *_, tiles, _, height, width = pixels_of(kind, made).shape
    return int(tiles), int(height), int(width)


def array_of(form: str, kind: str, made: Mapping[str, Any]) -> np.ndarray:
    """The array of an item.

    Raises:
        ValueError: a part of its pixels is padding.
    """
    if form == PARTS:
        return _array_of_parts(kind, made)
    pixels = np.asarray(pixels_of(kind, made))
    if form == SIZED:
        _, height, width = grid_of(form, kind, made)
        return np.ascontiguousarray(pixels[0, :, :height, :width]).reshape(-1)
    if form == LISTED:
        if not np.asarray(made["pixel_attention_mask"]).all():
            raise ValueError("a part of its pixels is padding")
        return np.asarray(pixels[0])
    return pixels


def array_shape(form: str, patch: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
    """Shape of the array of an item.

    Args:
        form: Of the model's items.
        patch: Shape of a patch of a grid.
        grid: Of the item.
    """
    if form == GRID:
        return math.prod(grid), *patch
    number, height, width = grid
    return {SIZED: (3 * height * width,), PARTS: (width,)}.get(form, (number, 3, height, width))


def _parts(kind: str, made: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """(header that says what follows, arrays by name)."""
    lists = {n: np.asarray(x) for n, x in made.items() if is_whole_numbers(x)}
    arrays = {n: x for n, x in made.items() if n not in _OF_TEXT and hasattr(x, "shape")} | lists
    what = [(n, "list" if n in lists else _type_of(x)) for n, x in arrays.items()]
    head = [kind, [[name, dtype, list(arrays[name].shape)] for name, dtype in what]]
    return json.dumps(head).encode(), arrays


def _array_of_parts(kind: str, made: Mapping[str, Any]) -> np.ndarray:
    """Floats as they are, everything else byte by byte: types of 16 bits hold numbers up to 256 exactly."""
    head, arrays = _parts(kind, made)
    flat = [np.frombuffer(len(head).to_bytes(NUM_BYTES, "little") + head, np.uint8)]
    for x in map(np.asarray, arrays.values()):
        flat.append(x.reshape(-1) if _is_float(x) else np.frombuffer(x.astype("<i4").tobytes(), np.uint8))
    return np.concatenate([x.astype(np.float32) for x in flat])


def is_whole_numbers(x: Any) -> bool:
    """Whether a value is a list of whole numbers, or of such lists of one length, which classes take as they are."""
    if not isinstance(x, list) or not x:
        return False
    if all(isinstance(each, list) for each in x):
        return len({len(each) for each in x}) == 1 and all(map(is_whole_numbers, x))
    return all(type(each) is int for each in x)


def _type_of(x: Any) -> str:
    return "float" if _is_float(x) else "bool" if "bool" in str(x.dtype) else "int"


def _is_float(x: Any) -> bool:
    return "float" in str(x.dtype)


def _num_frames(made: Mapping[str, Any]) -> int:
    """Frames of a sound, where the processor makes a mask of them; else 1."""
    masks = (np.asarray(x) for name, x in made.items() if name.endswith("mask") and name not in _OF_TEXT)
    return max(1, int(next((x.sum() for x in masks), 1)))
