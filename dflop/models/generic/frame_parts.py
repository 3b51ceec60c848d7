"""Whether a tower's frames can be cut over ranks: a small copy runs them whole and in two, in float64.

Its keys and values of whole frames are kept while it runs whole, so that a part gets those of the rest without a second
rank. A tower that takes more than positions from sizes, or mixes tokens anywhere but in attention, makes other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.attention import FrameKeys
from dflop.models.build import EncoderStage
from dflop.models.family import GENERIC, Places
from dflop.models.generic import arrays, items
from dflop.models.generic.random_items import NotMade, item_of

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
        grid = arrays.grid_of(arrays.GRID, "image", item.made)
        data = torch.from_numpy(arrays.array_of(arrays.GRID, "image", item.made)).double()
        with torch.no_grad():
            return _merged(stage, data, torch.tensor([grid]), item.num_rows)
    except (ConfigError, NotMade, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return 0  # it is not called as towers are that take parts


def _merged(stage: EncoderStage, data: torch.Tensor, sizes: torch.Tensor, num_rows: int) -> int:
    """The tokens of a row, if rows of two parts are those of the whole item."""
    num_tokens, kept = int(sizes.prod()), list[torch.Tensor]()
    each = num_tokens // num_rows
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32)

    def keep(own: torch.Tensor) -> torch.Tensor:
        kept.append(own)
        return own

    def rows(first: int, end: int, keys: FrameKeys) -> torch.Tensor:
        made: torch.Tensor = stage(data[first:end], sizes, stage.arithmetic(sizes, [(0, first, end)]), frame_keys=keys)
        return made

    plain = stage(data, sizes)
    found = [rows(0, num_tokens, FrameKeys(bounds, num_tokens, keep))]
    middle, layers = num_rows // 3 * each, list[Iterator[Any]]()
    for first, end in ((0, middle), (middle, num_tokens)):
        layers.append(iter(kept))
        found.append(rows(first, end, FrameKeys(bounds, num_tokens, lambda _: next(layers[-1]))))
    is_every_layer = len(kept) == len(stage.layers) and all(next(of, None) is None for of in layers)
    error = max(float((x - plain).abs().max()) for x in (found[0], torch.cat(found[1:])))
    return each if middle and is_every_layer and error <= _LIMIT * float(plain.abs().max()) else 0
