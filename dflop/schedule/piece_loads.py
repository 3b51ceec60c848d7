"""What context-parallel ranks have of a group's load, of all microbatches of a step at once.

Tiles are dealt out as by `dflop/simulate/pieces.py`, lines of samples are cut as there but for a token: these cuts
decide nothing, they only say what a step takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.assignment import split_items
from dflop.schedule.items import Ints, ModuleItems
from dflop.simulate.pieces import NUM_CHUNKS, UNEVEN_FRAC, media_cost


class PieceLoads(NamedTuple):
    """Loads of ranks, `[3, cells, cp]`, and the most tokens whose keys and values one of them receives, `[cells]`."""

    loads: Floats
    received: Floats


def piece_loads(
    items: ModuleItems, cell: Ints, num_cells: int, num_pieces: int, growth: float, max_tokens: int = 0
) -> PieceLoads:
    """Loads of the pieces of every cell's line.

    Args:
        items: Of the LLM, samples.
        cell: Of every sample, whose microbatch on whose group it is in.
        num_cells: Microbatches times groups.
        num_pieces: Ranks of a group.
        growth: As for `pieces.cut`.
        max_tokens: As for `pieces.cut`.
    """
    order = np.argsort(cell, kind="stable")
    of_cell, lengths = cell[order], items.num_tokens[order].astype(np.float64)
    first = np.searchsorted(of_cell, np.arange(num_cells + 1))
    tokens, costs = (np.concatenate([[0.0], np.cumsum(x)]) for x in (lengths, _cost(lengths, growth)))
    ends = tokens[first[:-1], np.newaxis] + _ends(first, tokens, costs, num_pieces, growth, max_tokens)
    starts = tokens[:-1, np.newaxis]
    low, high = (np.clip(edges[of_cell] - starts, 0, lengths[:, np.newaxis]) for edges in (ends[:, :-1], ends[:, 1:]))
    counted = np.divide(items.num_items[order], lengths, out=np.zeros_like(lengths), where=lengths > 0)
    of_samples = ((high - low) * counted[:, np.newaxis], high - low, high**2 - low**2)
    # A sample without tokens loses nothing here: it costs nothing either.
    loads = np.array([_summed(x, of_cell, num_cells) for x in of_samples])
    cut = np.where(high > low, low, 0.0)  # tokens before a piece of its first sample
    received = np.zeros(num_cells)
    np.maximum.at(received, of_cell, cut.max(axis=1, initial=0.0))
    return PieceLoads(loads, received)


def tile_loads(
    items: ModuleItems, cell: Ints, num_cells: int, num_ranks: int, growth: float = 0.0, max_tokens: int = 0,
    merge_tokens: int = 0,
) -> PieceLoads:  # fmt: skip
    """Loads of the ranks that an encoder's items are dealt out to.

    Args:
        items: Of an encoder.
        cell: Of every item, whose microbatch on whose group it is in.
        num_cells: Microbatches times groups.
        num_ranks: Of a group.
        growth: As for `pieces.media_cost`.
        max_tokens: As for `pieces.deal_tiles`.
        merge_tokens: As for `pieces.deal_tiles`.
    """

    def deal_by(weights: Ints) -> PieceLoads:
        found = _evenly(items, weights, cell, num_cells, num_ranks)
        loads, received = found[:3], np.zeros(num_cells)
        is_uneven = UNEVEN_FRAC * num_ranks * found[3].max(axis=1) > (UNEVEN_FRAC + 1) * found[3].sum(axis=1)
        if merge_tokens and is_uneven.any():
            poured = _poured(items, weights, cell, num_cells, num_ranks, merge_tokens)
            loads[:, is_uneven], received[is_uneven] = poured.loads[:, is_uneven], poured.received[is_uneven]
        return PieceLoads(loads, received)

    costs = media_cost(items.num_tokens, items.sum_sq_tokens.astype(np.int64), growth)
    found = deal_by(costs)
    tokens = found.loads[1]
    is_over = np.rint(tokens.max(axis=1)) * num_ranks > np.rint(np.maximum(tokens.sum(axis=1), max_tokens))
    if max_tokens and is_over.any():
        even = (
            _poured(items, costs, cell, num_cells, num_ranks, merge_tokens, has_even_tokens=True)
            if merge_tokens
            else deal_by(items.num_tokens)
        )
        found.loads[:, is_over], found.received[is_over] = even.loads[:, is_over], even.received[is_over]
    return found


def _evenly(items: ModuleItems, weights: Ints, cell: Ints, num_cells: int, num_ranks: int) -> Floats:
    """`[4, cells, cp]`: loads of chunks of whole tiles or frames, and weights."""
    total = np.zeros(num_cells, dtype=np.int64)
    np.add.at(total, cell, weights)
    wanted = -(-NUM_CHUNKS * num_ranks * weights // np.maximum(total, 1)[cell])
    num_chunks = np.clip(wanted, 1, items.num_parts)
    size, larger = np.divmod(items.num_parts, num_chunks)
    item = np.repeat(np.arange(len(cell)), num_chunks)
    place = np.arange(len(item)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    parts = size[item] + (place < larger[item])
    of_parts = weights[item] * parts // items.num_parts[item]
    rank = cell[item] * num_ranks + split_items(cell[item], of_parts.astype(np.float64), num_cells, num_ranks)
    share = parts / items.num_parts[item]
    loads = [np.bincount(rank, of[item] * share, num_cells * num_ranks) for of in (*items.loads, weights)]
    return np.array(loads, dtype=float).reshape(4, num_cells, num_ranks)


def _poured(
    items: ModuleItems, weights: Ints, cell: Ints, num_cells: int, num_ranks: int, merge_tokens: int, *,
    has_even_tokens: bool = False,
) -> PieceLoads:  # fmt: skip
    """Loads of ranks between which items are cut, as by `pieces._poured`; `has_even_tokens`: it is given tokens."""
    total = np.bincount(cell, weights, num_cells)
    chunk = total[cell] / (NUM_CHUNKS * num_ranks)
    (small,), (large,) = np.nonzero(weights <= chunk), np.nonzero(weights > chunk)
    loads = np.zeros((4, num_cells * num_ranks))
    dealt_by = (items.num_tokens if has_even_tokens else weights)[small].astype(float)
    ranks = cell[small] * num_ranks + split_items(cell[small], dealt_by, num_cells, num_ranks)
    for row, of in zip(loads, (*items.loads, weights), strict=True):
        row += np.bincount(ranks, of[small], num_cells * num_ranks)
    rooms = np.maximum(total[:, np.newaxis] / num_ranks - loads[3].reshape(num_cells, num_ranks), 0).cumsum(axis=1)
    large = large[np.argsort(cell[large], kind="stable")]
    weight, tokens, frames = weights[large].astype(float), items.num_tokens[large], items.num_parts[large]
    ends = weight.cumsum()
    first = np.searchsorted(cell[large], np.arange(num_cells + 1))
    before = np.concatenate([[0.0], ends])
    rest = before[first[1:]] - before[first[:-1]]
    start = before[:-1] - before[first[:-1]][cell[large]]
    borders = rooms * (rest / np.maximum(rooms[:, -1], 1e-9))[:, np.newaxis]
    grain = np.where(weight > chunk[large] * frames, merge_tokens, tokens // frames)[:, np.newaxis]
    inside = np.clip((borders[cell[large]] - start[:, np.newaxis]) / weight[:, np.newaxis], 0, 1)
    if has_even_tokens:
        inside = np.tile(np.arange(1, num_ranks + 1) / num_ranks, (len(large), 1))
    cuts = np.floor(inside * (tokens[:, np.newaxis] / grain) + 0.5) * grain
    cuts = np.concatenate([np.zeros((len(large), 1)), cuts], axis=1)
    low, high, each = cuts[:, :-1], cuts[:, 1:], (tokens // frames)[:, np.newaxis]
    share = (high - low) / tokens[:, np.newaxis]
    found = loads[:3].reshape(3, num_cells, num_ranks) + np.array(
        [_summed(of[large, np.newaxis] * share, cell[large], num_cells) for of in items.loads]
    )
    others = np.where(high > low, np.ceil(high / each) * each - np.floor(low / each) * each - (high - low), 0.0)
    return PieceLoads(found, _summed(others, cell[large], num_cells).max(axis=1))


def _ends(first: Ints, tokens: Floats, costs: Floats, num_pieces: int, growth: float, max_tokens: int) -> Floats:
    """`[cells, pieces + 1]` in tokens of the cell's line.

    `tokens` and `costs` are running sums over all samples, those of a cell from `first` on.
    """
    start, line = tokens[first[:-1]], np.diff(tokens[first])
    most = line if not max_tokens else np.maximum(-(-max_tokens // num_pieces), np.ceil(line / num_pieces))
    found, done = [np.zeros_like(line)], costs[first[:-1]]
    for left in range(num_pieces, 1, -1):
        target = done + (costs[first[1:]] - done) / left
        place = _place(first, target, costs, tokens, growth) - start
        lowest = np.maximum(found[-1], line - (left - 1) * most)
        found.append(np.minimum(np.maximum(place, lowest), np.minimum(found[-1] + most, line)))
        at = start + found[-1]
        sample = np.clip(np.searchsorted(tokens, at, side="right") - 1, first[:-1], np.maximum(first[1:] - 1, 0))
        done = costs[sample] + _cost(at - tokens[sample], growth)
    return np.stack([*found, line], axis=1)


def _place(first: Ints, target: Floats, costs: Floats, tokens: Floats, growth: float) -> Floats:
    """Running tokens at which the running cost reaches a target, whole ones."""
    sample = np.clip(np.searchsorted(costs, target, side="right") - 1, first[:-1], np.maximum(first[1:] - 1, 0))
    rest, half = target - costs[sample], growth / 2
    # Of `n + half * n * (n - 1) = rest`.
    inside = rest if not half else ((half - 1) + np.sqrt((1 - half) ** 2 + 4 * half * np.maximum(rest, 0))) / growth
    found: Floats = tokens[sample] + np.floor(inside + 1e-9)
    return found


def _cost(num_tokens: Floats, growth: float) -> Floats:
    """Cost of the first tokens of samples, in units of a sample's first token."""
    found: Floats = num_tokens + growth / 2 * num_tokens * (num_tokens - 1)
    return found


def _summed(values: Floats, cell: Ints, num_cells: int) -> Floats:
    """`[cells, pieces]` of `[samples, pieces]`."""
    return np.stack([np.bincount(cell, column, num_cells) for column in values.T], axis=1)
