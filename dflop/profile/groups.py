"""Which packed groups to time: real sample shapes, grouped so that the cost terms can be told apart.

Tokens, squared tokens and item counts rise together in random groups, and a fit on those alone cannot separate them.
Length-sorted groups (a few of the longest samples, then many of the shorter: like tokens, unlike squares) and
tile-sorted groups (the same by size of item: like tokens, unlike item counts) break that collinearity; single samples
anchor the fixed cost. Where all groups are of one size, every other one holds its samples twice.

Of a pool of these a fixed grid is timed, on logarithmic scales: after the smallest and the largest always the group
that is farthest from all before it. A design that chose each group by what the ones before took predicted no better
(docs/tried.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.errors import DataError
from dflop.models.family import Family
from dflop.records import LLM, MediaItem, ModuleLoad, ModuleSpec, SampleShape

KINDS = ("random", "length_sorted", "tile_sorted", "single")
POOL_FACTOR = 4
"""Groups to choose from per group of the grid."""
SIZE_WEIGHT, LENGTH_WEIGHT, ITEMS_WEIGHT = 2.0, 1.0, 0.6
"""Weights of the distance between groups; the whole range of each counts as one."""


@dataclass(frozen=True, slots=True)
class ProbeGroup:
    """One packed microbatch to time."""

    kind: str
    samples: tuple[SampleShape, ...]
    items: tuple[MediaItem, ...]
    """Items of the probed encoder; empty for the LLM."""
    load: ModuleLoad


def used_modules(family: Family, shapes: Sequence[SampleShape]) -> tuple[ModuleSpec, ...]:
    """Modules the data brings work to, in the family's order; an encoder nobody uses gets no process.

    Raises:
        DataError: there are none.
    """
    used = tuple(spec for spec in family.specs() if any(s.load(spec.module).num_tokens for s in shapes))
    if not used:
        raise DataError("no sample brings work to the model", hint="the dataset has no valid sample")
    return used


def probe_groups(
    shapes: Sequence[SampleShape], module: str, *, num_groups: int, max_samples: int, seed: int
) -> tuple[ProbeGroup, ...]:
    """Groups to time, in order: however many of them are timed, their sizes are spread over those of the data.

    Args:
        shapes: The data distribution.
        module: Encoder name or `llm`.
        num_groups: How many groups.
        max_samples: Largest group, in samples.
        seed: Fixes the draw.

    Returns:
        The groups, or an empty tuple when no sample has work for the module.
    """
    pool = drawn_groups(shapes, module, num_groups=POOL_FACTOR * num_groups, max_samples=max_samples, seed=seed)
    return tuple(pool[i] for i in _spread([group.load for group in pool], num_groups))


def _spread(loads: Sequence[ModuleLoad], most: int) -> list[int]:
    """Indices of the smallest, the largest, and then of what is farthest from all that are taken."""
    if not loads:
        return []
    items, tokens, squares = np.array([(x.num_items, x.num_tokens, x.sum_sq_tokens) for x in loads], dtype=float).T
    place = np.log(np.stack([tokens, squares / tokens, (items + 1) / tokens], axis=1))
    place -= place.min(axis=0)
    place *= np.array([SIZE_WEIGHT, LENGTH_WEIGHT, ITEMS_WEIGHT]) / np.maximum(place.max(axis=0), 1e-9)
    taken = [int(tokens.argmin()), int(tokens.argmax())][:most]
    distance = np.full(len(loads), np.inf)
    for index in taken:
        distance = np.minimum(distance, ((place - place[index]) ** 2).sum(axis=1))
    while len(taken) < most:
        distance[taken] = -1.0
        taken.append(int(distance.argmax()))
        distance = np.minimum(distance, ((place - place[taken[-1]]) ** 2).sum(axis=1))
    return taken


def drawn_groups(
    shapes: Sequence[SampleShape], module: str, *, num_groups: int, max_samples: int, seed: int
) -> tuple[ProbeGroup, ...]:
    """Groups of samples that bring work to `module`, cycling through `KINDS`; the pool of `probe_groups`."""
    rng = np.random.default_rng([seed, len(shapes)])
    users = [s for s in shapes if s.load(module).num_tokens > 0]
    if not users:
        return ()
    by_length = sorted(users, key=lambda s: s.load(module).num_tokens)
    by_item = sorted(users, key=lambda s: s.load(module).num_tokens / s.load(module).num_items)
    groups = []
    for i in range(num_groups):
        kind = KINDS[i % len(KINDS)]
        if kind in ("random", "single"):
            size = 1 if kind == "single" else int(np.exp(rng.uniform(0, np.log(max_samples + 1))))
            chosen = rng.choice(len(users), min(max(size, 1), len(users)), replace=False)
            picked: Sequence[SampleShape] = [users[j] for j in chosen]
        else:
            ordered = by_length if kind == "length_sorted" else by_item
            picked = _neighbours(ordered, max_samples, rng, few=i // len(KINDS) % 2 == 1)
        groups.append(make_group(kind, picked, module))
    if len({group.load.num_tokens for group in groups}) == 1:
        # One size tells no fixed cost from one per token.
        groups[1::2] = [make_group(group.kind, group.samples * 2, module) for group in groups[1::2]]
    return tuple(groups)


def _neighbours(
    ordered: Sequence[SampleShape], max_samples: int, rng: np.random.Generator, *, few: bool
) -> Sequence[SampleShape]:
    """A few samples of the upper end, or many of the lower half."""
    if few:
        size = int(rng.integers(1, max(1, max_samples // 3) + 1))
        first = int(0.85 * len(ordered))
        start = int(rng.integers(first, max(first, len(ordered) - size) + 1))
    else:
        size = int(rng.integers(max(1, max_samples // 2), max_samples + 1))
        start = int(rng.integers(0, (len(ordered) + 1) // 2))
    return ordered[start : start + size]


def make_group(kind: str, samples: Sequence[SampleShape], module: str) -> ProbeGroup:
    """Group of `samples` with its total load on `module`."""
    items = () if module == LLM else tuple(i for s in samples for i in s.items if i.module == module)
    load = sum((s.load(module) for s in samples), ModuleLoad(0, 0, 0))
    return ProbeGroup(kind, tuple(samples), items, load)


def load_on(family: Family, module: str, group: ProbeGroup) -> ModuleLoad:
    """Load of a group on a shallow module, whose attention windows may differ from those of the full model."""
    if module == LLM:
        return group.load
    tokens = sum(item.num_tokens for item in group.items)
    return ModuleLoad(len(group.items), tokens, sum(family.sum_sq_tokens(item) for item in group.items))
