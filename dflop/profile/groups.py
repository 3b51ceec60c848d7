"""Which packed groups to time: real sample shapes, grouped so that the cost terms can be told apart.

Tokens, squared tokens and item counts rise together in random groups, and a fit on those alone cannot separate them.
Groups drawn from length-sorted neighbours (equal tokens, very different squares) and tile-sorted neighbours (few big
items against many small ones) break that collinearity; single samples anchor the fixed cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
        size = 1 if kind == "single" else int(np.exp(rng.uniform(0, np.log(max_samples + 1))))
        size = min(max(size, 1), len(users))
        if kind in ("random", "single"):
            picked = [users[j] for j in rng.choice(len(users), size, replace=False)]
        else:
            ordered = by_length if kind == "length_sorted" else by_item
            start = int(rng.integers(0, len(ordered) - size + 1))
            picked = ordered[start : start + size]
        groups.append(make_group(kind, picked, module))
    return tuple(groups)


def make_group(kind: str, samples: Sequence[SampleShape], module: str) -> ProbeGroup:
    """Group of `samples` with its total load on `module`."""
    items = () if module == LLM else tuple(i for s in samples for i in s.items if i.module == module)
    load = sum((s.load(module) for s in samples), ModuleLoad(0, 0, 0))
    return ProbeGroup(kind, tuple(samples), items, load)
