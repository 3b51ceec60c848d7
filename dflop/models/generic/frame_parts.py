"""Whether a tower's frames can be cut over ranks: a small copy runs two of them whole and in parts, in float64.

Its keys and values of whole frames are kept while it runs whole, so that a part gets those of the rest without a second
rank. A tower that takes more than positions from sizes, or mixes tokens anywhere but in attention, makes other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.attention import FrameKeys
from dflop.models.build import EncoderStage
from dflop.models.family import GENERIC, Places
from dflop.models.generic import arrays, items
from dflop.models.generic.random_items import NotMade, item_of

Part = tuple[int, int, int]
"""(item, first patch, end)."""
_LIMIT = 1e-9
"""Relative error of rows in float64."""


def merge_tokens_of(model: nn.Module, places: Places, medium: str = "vision") -> int:
    """`ModuleSpec.merge_tokens` of a tower that takes grids of patches; 0: its frames stay whole.

    Args:
        model: Small, with memory; stays as it is.
        places: Where its modules sit.
        medium: The tower's.
    """
    tower = places.towers.get(medium)
    if tower is None or tower.call != GENERIC:
        return 0
    attention.register()
    try:
        item = item_of(model, "image", torch.Generator().manual_seed(0))
        stage = EncoderStage(copy.deepcopy(model), tower).double()
        if items.form_of(stage.shell) != arrays.GRID or not item.num_rows:
            return 0
        frames, height, width = arrays.grid_of(arrays.GRID, "image", item.made)
        data = torch.from_numpy(arrays.array_of(arrays.GRID, "image", item.made)).double()
        sizes = torch.tensor([(frames, height, width), (frames, width, height)])  # whose arithmetic differs
        with torch.no_grad():
            return _merged(stage, torch.cat([data, data.flip(0)]), sizes, item.num_rows)
    except (ConfigError, NotMade, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return 0  # it is not called as towers are that take parts


def _merged(stage: EncoderStage, data: torch.Tensor, sizes: torch.Tensor, num_rows: int) -> int:
    """The tokens of a row, if rows of parts are those of two whole items of as many tokens and `num_rows` each."""
    num_tokens, kept = len(data) // 2, list[torch.Tensor]()
    each = num_tokens // num_rows
    middle = num_rows // 3 * each

    def keep(own: torch.Tensor) -> torch.Tensor:
        kept.append(own)
        return own

    def rows(parts: Sequence[Part], exchange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        bounds = torch.arange(len(parts) + 1, dtype=torch.int32) * num_tokens
        given = torch.cat([data[item * num_tokens :][first:end] for item, first, end in parts])
        keys = FrameKeys(bounds, num_tokens, exchange)
        made: torch.Tensor = stage(given, sizes, stage.arithmetic(sizes, parts), frame_keys=keys)
        return made

    plain = stage(data, sizes)
    found = [rows([(0, 0, num_tokens), (1, 0, num_tokens)], keep)]
    layers = iter(kept), iter(kept)
    found.append(rows([(0, 0, num_tokens), (1, 0, middle)], lambda _: next(layers[0])))
    found.append(rows([(1, middle, num_tokens)], lambda _: next(layers[1])[num_tokens:]))
    is_every_layer = len(kept) == len(stage.layers) and all(next(of, None) is None for of in layers)
    error = max(float((x - plain).abs().max()) for x in (found[0], torch.cat(found[1:])))
    return each if middle and is_every_layer and error <= _LIMIT * float(plain.abs().max()) else 0
