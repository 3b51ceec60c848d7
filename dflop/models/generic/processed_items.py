"""Pictures, clips and sounds for a shrunk model as the model's own processor makes them, from random pixels."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dflop.models.generic.arrays import is_whole_numbers
from dflop.models.generic.classes import MARKS, entry_of, takes
from dflop.models.generic.media_processor import KINDS, MediaProcessor
from dflop.models.generic.random_items import SECONDS, Item, as_type, call_of, token_of
from dflop.models.media import MediaHeader

_WIDTH_PX, _HEIGHT_PX, _DURATION_S, _NUM_CHUNKS = 112, 56, 2.0, 2
"""The random item; a clip has so many temporal patches."""
_OF_TEXT = ("input_ids", "attention_mask")
_OF_TOKENS = "token_type_ids"
"""End of names of what has an entry per token of a text."""


def small_processor(processor: MediaProcessor, config: Any, small: Any) -> MediaProcessor:
    """The processor of a shrunk model: pixels of its sizes shrink as the sides of the towers' pictures did.

    Args:
        processor: Of the model; unchanged.
        config: Of the model.
        small: Its shrunk copy.
    """
    made, sides = copy.deepcopy(processor.processor), dict(_sides(config, small))
    for part in (made, *(getattr(made, name, None) for _, name in KINDS.values())):
        for name, value in list(vars(part).items()) if part is not None else ():
            if "size" in name or "pinpoints" in name:
                setattr(part, name, _scaled(value, sides))
            if name == "tile_size" and value not in sides and sides:
                setattr(part, name, sides[max(sides)])  # so that a random picture has tiles
    return MediaProcessor(made, processor.options)


def _sides(config: Any, small: Any) -> Iterator[tuple[int, int]]:
    """(side, side in the small copy) of the pictures of every section, in pixels."""
    from transformers import PreTrainedConfig

    for key in vars(config):
        old, new = entry_of(config, key), entry_of(small, key)
        if isinstance(old, PreTrainedConfig):
            yield from _sides(old, new)
        elif key == "image_size" and old and new:
            yield _side(old), _side(new)


def _side(size: Any) -> int:
    side: int = size if isinstance(size, int) else size[0]
    return side


def _scaled(value: Any, sides: Mapping[int, int]) -> Any:
    if isinstance(value, dict):
        return {key: _scaled(each, sides) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_scaled(each, sides) for each in value)
    if hasattr(value, "shortest_edge"):  # transformers' sizes with names
        return type(value)(**{key: _scaled(each, sides) for key, each in vars(value).items()})
    side = max((side for side in sides if isinstance(value, int) and value and value % side == 0), default=0)
    return value // side * sides[side] if side else value


def processed_item(model: Any, kind: str, processor: MediaProcessor, generator: torch.Generator) -> Item:
    """What a processor makes of a random item.

    Args:
        model: Small.
        kind: `image`, `video` or `audio`.
        processor: Its own, as small.
        generator: Of the item's pixels.

    Raises:
        Exception: whatever the processor or the encoder raises that does not take it.
    """
    part = getattr(processor.processor, KINDS[kind][1], None)
    frames = _NUM_CHUNKS * (getattr(part, "temporal_patch_size", None) or 1) if kind == "video" else 1
    header = MediaHeader(kind, _WIDTH_PX, _HEIGHT_PX, frames, 0.0 if kind == "image" else _DURATION_S)
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    media: np.ndarray
    if kind == "audio":
        media = rng.standard_normal(processor.num_samples(header), dtype=np.float32) / 10
    else:
        taken = processor.frame_indices(frames, frames / _DURATION_S) if kind == "video" else (0,)
        media = rng.integers(0, 256, (len(taken), _HEIGHT_PX, _WIDTH_PX, 3), dtype=np.uint8)
    call = call_of(model, kind)
    said = processor.inputs_of(header, media)
    given = {n: x for n, x in said.items() if isinstance(x, torch.Tensor) or is_whole_numbers(x)}
    made = {
        name: x
        for name, x in as_type(given, torch.float32).items()
        if name not in _OF_TEXT and not name.endswith(_OF_TOKENS) and (name in call.parameters or takes(model, name))
    }
    seconds = [float(made[name][0]) for name in SECONDS if name in made]
    marks = [int(given[name].max()) for name in MARKS if name in given]
    num_rows, seconds_per_grid = call.num_rows(made), seconds[0] if seconds else 0.0
    return Item(kind, made, token_of(model, kind), num_rows, seconds_per_grid, marks[0] if marks else 0)
