"""Who of context-parallel ranks has which tokens and which media of a microbatch: from plan and StepPlan alone.

The samples of a group's microbatch are a line of tokens in packed order. It is cut into one piece per rank where the
cost is equal: a token costs more the more tokens of its sample are before it, since it attends to them. Media are
dealt out in chunks of tiles or frames, by what these cost: a tile of many tokens costs more per token than a small
one. Where that leaves a rank with too much, as one large picture does, and the encoder can share a frame, large items
are cut wherever ranks have had their share. Who has the first of an item gathers what others made of the rest. Ranks,
scheduler and simulator work all of it out for themselves, in whole numbers: the same on every machine.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dflop.records import LLM, MediaItem, Plan, StepPlan

_SCALE = 1 << 24
"""Scale of costs as whole numbers."""
_MEDIA_SCALE = 1 << 20
"""The same of media, whose squared tokens are larger."""
NUM_CHUNKS = 4
"""Per rank, of about equal size, in which the media of a microbatch are dealt out where they can be cut."""
UNEVEN_FRAC = 16
"""Frames are cut where a rank has more than its share by one part in so many: cuts cost messages in every layer."""


class TileRange(NamedTuple):
    """Parts `[first, end)` of an encoder's item, as `num_parts` counts them."""

    item: int
    first: int
    end: int


class FramePart(NamedTuple):
    """Tokens `[first, end)` of a tile or frame of an encoder's item."""

    item: int
    frame: int
    first: int
    end: int


class Piece(NamedTuple):
    """Tokens `[first, end)` of the sample at a position of the global batch."""

    sample: int
    first: int
    end: int


def cut(lengths: Sequence[int], num_pieces: int, growth: float, max_tokens: int = 0) -> tuple[int, ...]:
    """Where pieces end in a line of samples, so that they cost the same; the last ends where the line does.

    Args:
        lengths: Tokens of each sample.
        num_pieces: At least 1; some are empty where there are fewer tokens.
        growth: By how much a token costs more for each token before it in its sample, relative to the first.
        max_tokens: That all pieces together may have at most: none gets more than its share of them, but for what the
            line has more; 0: no limit.
    """
    starts, costs = [0], [0]
    for length in lengths:
        starts.append(starts[-1] + length)
        costs.append(costs[-1] + _cost(length, growth))
    total, ends = starts[-1], [0]
    most = max(-(-max_tokens // num_pieces), -(-total // num_pieces)) if max_tokens else total
    done = 0
    for left in range(num_pieces, 1, -1):
        target = done + (costs[-1] - done) // left
        sample = min(bisect_right(costs, target), len(lengths)) - 1
        place = starts[max(sample, 0)] + _tokens(target - costs[max(sample, 0)], growth)
        end = min(max(place, ends[-1], total - (left - 1) * most), ends[-1] + most, total)
        sample = max(min(bisect_right(starts, end), len(lengths)) - 1, 0)
        done = costs[sample] + _cost(end - starts[sample], growth)
        ends.append(end)
    return (*ends[1:], total)


def pieces(plan: Plan, step_plan: StepPlan, microbatch: int, dp_rank: int) -> tuple[tuple[Piece, ...], ...]:
    """Per context-parallel rank what it has of the LLM's samples, in packed order."""
    llm, work = plan.module(LLM), step_plan.of(LLM)
    items = work.owner[microbatch][dp_rank]
    lengths = [work.item_rows[item] for item in items]
    ends = cut(lengths, llm.parallel.cp, llm.cost_growth, llm.max_tokens)
    starts = list(itertools.accumulate(lengths, initial=0))
    return tuple(
        tuple(
            Piece(work.item_sample[item], max(low - start, 0), min(high - start, length))
            for item, start, length in zip(items, starts, lengths, strict=False)
            if max(low, start) < min(high, start + length)
        )
        for low, high in itertools.pairwise((0, *ends))
    )


def most_tokens(plan: Plan, step_plan: StepPlan, microbatch: int, replica: int) -> int:
    """LLM tokens of a microbatch in the fullest `cp` group among those that share experts with a replica.

    Layers run again by it: what experts exchange, all ranks that share them exchange again or none.
    """
    parallel, work = plan.module(LLM).parallel, step_plan.of(LLM)
    first = replica - replica % parallel.ep
    dp_ranks = {number // parallel.cp for number in range(first, first + parallel.ep)}
    return max(sum(work.item_rows[item] for item in work.owner[microbatch][dp_rank]) for dp_rank in dp_ranks)


def dealt(
    plan: Plan, step_plan: StepPlan, module: str, microbatch: int, dp_rank: int, media: Callable[[int], MediaItem]
) -> tuple[tuple[TileRange, ...], ...]:
    """Per context-parallel rank what it encodes of an encoder's items, in packed order.

    Args:
        plan: The layout.
        step_plan: The step.
        module: The encoder.
        microbatch: Which.
        dp_rank: The group.
        media: Of an item's id.
    """
    part, items = plan.module(module), step_plan.of(module).owner[microbatch][dp_rank]
    found = [media(item) for item in items]
    of_ranks = deal_tiles(
        [m.num_tokens for m in found], [num_parts(m) for m in found], part.parallel.cp,
        [media_cost(m.num_tokens, m.sum_sq_tokens, part.cost_growth) for m in found], part.max_tokens,
        part.merge_tokens,
    )  # fmt: skip
    return tuple(tuple(r._replace(item=items[r.item]) for r in of) for of in of_ranks)


def frame_parts(
    ranges: Sequence[TileRange], merge_tokens: int, frame_tokens: Callable[[int], int]
) -> list[FramePart]:  # fmt: skip
    """What ranges that count runs of `merge_tokens` have of each frame; `frame_tokens` are those of an item's frame."""
    found = []
    for r in ranges:
        first, end, each = r.first * merge_tokens, r.end * merge_tokens, frame_tokens(r.item)
        for frame in range(first // each, -(-end // each)):
            start = frame * each
            found.append(FramePart(r.item, frame, max(first - start, 0), min(end - start, each)))
    return found


def owned(ranges: Sequence[TileRange]) -> tuple[int, ...]:
    """Items that a rank hands on: those whose first tile it encodes."""
    return tuple(r.item for r in ranges if not r.first)


def deal(rows: Sequence[int], num_ranks: int) -> list[int]:
    """Rank of each item: most rows first, to whoever has fewest."""
    found, loads = [0] * len(rows), [0] * num_ranks
    for item in sorted(range(len(rows)), key=lambda item: -rows[item]):
        found[item] = loads.index(min(loads))
        loads[found[item]] += rows[item]
    return found


def num_parts(item: MediaItem, merge_tokens: int = 0) -> int:
    """Tiles or frames that an encoder sees without the others, audio is one; or runs of tokens that it joins."""
    if merge_tokens:
        return item.num_tokens // merge_tokens
    return 1 if item.kind == "audio" else item.grid[0]


def media_cost(num_tokens: Any, sum_sq_tokens: Any, growth: float) -> Any:
    """Cost of an item, or of arrays of items, in twice `_MEDIA_SCALE`-ths of a token's; `growth` is as for `cut`."""
    return 2 * _MEDIA_SCALE * num_tokens + round(growth * _MEDIA_SCALE) * sum_sq_tokens


def deal_tiles(
    tokens: Sequence[int], parts: Sequence[int], num_ranks: int, costs: Sequence[int] = (), max_tokens: int = 0,
    merge_tokens: int = 0,
) -> list[list[TileRange]]:  # fmt: skip
    """Per rank what it encodes of items, in their order.

    Items are cut into chunks of whole tiles or frames, so many that a rank has about `NUM_CHUNKS`; the largest chunk
    goes first, to the rank with least. With `merge_tokens` ranges count runs of so many tokens, and where ranks would
    have too uneven shares, what is larger than a chunk is cut between runs.

    Args:
        tokens: Of each item, a multiple of its parts, and of `merge_tokens` in each part.
        parts: Tiles or frames of each item.
        num_ranks: Of the group.
        costs: Of each item, whole numbers that are dealt out evenly; empty: its tokens.
        max_tokens: That all ranks together may have. Where costs give a rank more than its share of these, or of all
            tokens if they are more, tokens are dealt out evenly, of large items that can be cut a part to every rank;
            0: no limit.
        merge_tokens: As `ModulePlan.merge_tokens`.
    """
    runs = [n // merge_tokens for n in tokens] if merge_tokens else parts

    def deal_by(weights: Sequence[int]) -> list[list[TileRange]]:
        found = _dealt_evenly(weights, parts, num_ranks)
        if not merge_tokens:
            return found
        most = max(sum(weights[r.item] * (r.end - r.first) // parts[r.item] for r in of) for of in found)
        if UNEVEN_FRAC * num_ranks * most > (UNEVEN_FRAC + 1) * sum(weights):
            return _poured(weights, parts, runs, num_ranks)
        each = [of_item // n for of_item, n in zip(runs, parts, strict=True)]
        return [[TileRange(r.item, r.first * each[r.item], r.end * each[r.item]) for r in of] for of in found]

    found = deal_by(costs or tokens)
    if costs and max_tokens:
        most = max(sum(tokens[r.item] // runs[r.item] * (r.end - r.first) for r in of) for of in found)
        if most * num_ranks > max(max_tokens, sum(tokens)):
            return _poured(costs, parts, runs, num_ranks, tokens) if merge_tokens else deal_by(tokens)
    return found


def _dealt_evenly(weights: Sequence[int], parts: Sequence[int], num_ranks: int) -> list[list[TileRange]]:
    total, chunks = sum(weights), list[TileRange]()
    for item, (weight, of_item) in enumerate(zip(weights, parts, strict=True)):
        num_chunks = max(1, min(of_item, -(-NUM_CHUNKS * num_ranks * weight // total))) if total else 1
        size, larger = divmod(of_item, num_chunks)
        ends = itertools.accumulate(size + (n < larger) for n in range(num_chunks))
        chunks += [TileRange(item, *pair) for pair in itertools.pairwise((0, *ends))]
    ranks = deal([weights[c.item] * (c.end - c.first) // parts[c.item] for c in chunks], num_ranks)
    found: list[list[TileRange]] = [[] for _ in range(num_ranks)]
    for chunk, rank in zip(chunks, ranks, strict=True):
        last = found[rank][-1] if found[rank] else None
        if last and (last.item, last.end) == (chunk.item, chunk.first):
            found[rank][-1] = last._replace(end=chunk.end)
        else:
            found[rank].append(chunk)
    return found


def _poured(
    weights: Sequence[int], frames: Sequence[int], runs: Sequence[int], num_ranks: int, tokens: Sequence[int] = ()
) -> list[list[TileRange]]:
    """Items of at most a chunk whole; the others fill up one rank after the other, cut where it has its share.

    A cut is between frames where these are no larger than a chunk, else between runs. With `tokens` all ranks have the
    same number of these: each of the others is cut into as many equal parts as there are ranks.
    """
    total = sum(weights)
    small = [item for item, weight in enumerate(weights) if weight * NUM_CHUNKS * num_ranks <= total]
    dealt_by = tokens or weights
    ranks, loads = dict(zip(small, deal([dealt_by[i] for i in small], num_ranks), strict=True)), [0] * num_ranks
    for item, rank in ranks.items():
        loads[rank] += weights[item]
    rooms = list(itertools.accumulate(max(0, total - num_ranks * load) for load in loads))
    rest, start = total - sum(loads), 0
    found: list[list[TileRange]] = [[] for _ in range(num_ranks)]
    for item, weight in enumerate(weights):
        if item in ranks:
            found[ranks[item]].append(TileRange(item, 0, runs[item]))
            continue
        is_fine = weight * NUM_CHUNKS * num_ranks > total * frames[item]
        grain = 1 if is_fine else runs[item] // frames[item]
        num_grains, first = runs[item] // grain, 0
        for rank, room in enumerate(rooms):
            border = weight * (rank + 1) // num_ranks if tokens else rest * room // rooms[-1] - start
            inside = min(max(border, 0), weight)
            end = grain * ((2 * inside * num_grains + weight) // (2 * weight))
            if end > first:
                found[rank].append(TileRange(item, first, end))
            first = end
        start += weight
    return found


def _cost(num_tokens: int, growth: float) -> int:
    """Cost of the first tokens of a sample, in twice `_SCALE`-ths of its first token's."""
    return 2 * _SCALE * num_tokens + round(growth * _SCALE) * num_tokens * (num_tokens - 1)


def _tokens(cost: int, growth: float) -> int:
    """The first tokens of a sample whose cost is nearest from below."""
    low, high = 0, cost // (2 * _SCALE) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _cost(middle, growth) <= cost else (low, middle)
    return low
