"""Which packed groups to time: real sample shapes, grouped so that the cost terms can be told apart.

Tokens, squared tokens and item counts rise together in random groups, and a fit on those alone cannot separate them.
Length-sorted groups (a few of the longest samples, then many of the shorter: like tokens, unlike squares) and
tile-sorted groups (the same by size of item: like tokens, unlike item counts) break that collinearity; single samples
anchor the fixed cost. On lognormal data the condition number of the design matrix is 0.5-0.65 of that of random groups.
Where all groups are of one size, every other one holds its samples twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.models.family import Family
from dflop.records import LLM, MediaItem, ModuleLoad, SampleShape

KINDS = ("random", "length_sorted", "tile_sorted", "single")


@dataclass(frozen=True, slots=True)
class ProbeGroup:
    """One packed microbatch to time."""

    kind: str
    samples: tuple[SampleShape, ...]
    items: tuple[MediaItem, ...]
    """Items of the probed encoder; empty for the LLM."""
    load: ModuleLoad


def probe_groups(
    shapes: Sequence[SampleShape], module: str, *, num_groups: int, max_samples: int, seed: int
) -> tuple[ProbeGroup, ...]:
    """Groups of samples that bring work to `module`, cycling through `KINDS`.

    Args:
        shapes: The data distribution.
        module: Encoder name or `llm`.
        num_groups: How many groups; fewer when no sample uses the module.
        max_samples: Largest group, in samples.
        seed: Fixes the draw.

    Returns:
        The groups, or an empty tuple when no sample has work for the module.
    """
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


def random_groups(
    shapes: Sequence[SampleShape], module: str, num_groups: int, *, max_samples: int, seed: int
) -> tuple[ProbeGroup, ...]:
    """Microbatches as training makes them: samples drawn by their weight, 1 to `max_samples` of them.

    Sizes are log-uniform: packing over data-parallel ranks makes small ones as often as large ones.
    """
    rng = np.random.default_rng([seed, len(shapes), 1])
    users = [s for s in shapes if s.load(module).num_tokens > 0]
    weights = np.array([s.weight for s in users])
    groups = []
    for _ in range(num_groups if users else 0):
        size = int(np.exp(rng.uniform(0, np.log(max_samples + 1))))
        chosen = rng.choice(len(users), max(size, 1), p=weights / weights.sum())
        groups.append(make_group("random", [users[i] for i in chosen], module))
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
