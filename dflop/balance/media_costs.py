"""What an encoder item costs: its patches where nothing else is known, or the seconds of a cost table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from dflop.cost.identity import tables_of_json
from dflop.cost.model import CostModel
from dflop.errors import ConfigError
from dflop.records import CostTable

MediaCost = Callable[[tuple[int, ...]], float]
"""Cost of an item's size: (frames, height, width) in patches, (height, width) in pixels, or nothing for a tile."""


def patches(size: tuple[int, ...]) -> float:
    """As many as there are; 1 for a tile of fixed size."""
    return float(math.prod(size))


def table_cost(
    tables: Path | str | Iterable[CostTable], module: str = "vision", *, is_frozen: bool = False
) -> MediaCost:
    """Seconds that an item adds to an encoder, forward and backward, by a fitted cost table.

    Frames attend to themselves. For encoders whose sizes are (frames, height, width) in patches.

    Args:
        tables: As a profile made them, or the `cost_tables.json` of a run directory.
        module: Name of the encoder in the tables.
        is_frozen: Whether its weights do not train.

    Raises:
        ConfigError: the file cannot be read.
        CostError: there is no table of the module.
    """
    model = CostModel(read_tables(tables), frozen={module} if is_frozen else None, extrapolate=True)
    num_layers = model.table(module).num_layers

    def cost(size: tuple[int, ...]) -> float:
        frames, *sides = size
        num_patches = math.prod(sides)
        load = 1, frames * num_patches, frames * num_patches**2
        return float(model.item_seconds(module, load, num_layers=num_layers, edge=True))

    return cost


def read_tables(tables: Path | str | Iterable[CostTable]) -> list[CostTable]:
    """Cost tables as they are given, or of a file that a run wrote.

    Raises:
        ConfigError: the file cannot be read, or has none.
    """
    if not isinstance(tables, Path | str):
        return list(tables)
    try:
        return tables_of_json(Path(tables).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"no list of cost tables: {error}", where=str(tables), hint="give the `cost_tables.json` of a run directory"
        ) from error
