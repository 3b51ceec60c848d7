"""Regret of every way of correcting, under truths that are known: all times are simulated.

Every contender plans each global batch with what it learnt from the steps before, under its own plans. A plan's cost
is its slowest slot under the truth; regret is what that exceeds the plan of an oracle by, who knows the truth. Made
corrections are taken to cost no time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from dflop.correct.estimate import StageTime
from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.items import Ints
from tests.bench.correct.balance import balanced, height_s, slot_loads
from tests.bench.correct.contenders import CONTENDERS, Contender, Times
from tests.bench.correct.worlds import CASES, MODULES, VISION, Batch, Truth, World
from tests.bench.figures import machine

NUM_SAMPLES, NUM_SLOTS, NUM_RANKS, NUM_STEPS = 256, 32, 4, 120
NOISES = (0.05, 0.15)
EARLY, LAST = slice(5, 21), slice(-40, None)
MIN_RECOVERED, MAX_REGRET_WHEN_RIGHT = 0.85, 0.001
STATIC_CASES = (
    "one LLM bucket 2x", "encoder top buckets 2x", "all buckets lognormal .25", "slow rank 1.5x",
    "bucket 2x and slow rank 1.5x",
)  # fmt: skip
"""Where something is to be recovered from the first step on."""
HARMLESS_CASES = ("right", "LLM 1.5x")
"""Where nothing is: a level that is off changes no balance."""


@dataclass(frozen=True)
class Run:
    """One contender in one case."""

    case: str
    noise_frac: float
    contender: str
    seed: int
    early_regret: float
    """Mean over steps 5-20."""
    last_regret: float
    """Mean over the last 40."""
    first_on: int | None
    """Step with the first plan that depends on factors by size or by rank."""
    on_frac: float
    """Of all steps."""
    num_switches: int


def simulate(
    case: str, noise_frac: float, seed: int, world: World, names: Sequence[str] = tuple(CONTENDERS),
    num_steps: int = NUM_STEPS,
) -> Iterator[Run]:  # fmt: skip
    """All contenders in one case, on the same batches."""
    contenders = {name: CONTENDERS[name](world, NUM_SLOTS, NUM_RANKS) for name in names}
    noise = {name: np.random.default_rng((seed, number)) for number, name in enumerate(names)}
    regret: dict[str, list[float]] = {name: [] for name in names}
    is_on: dict[str, list[bool]] = {name: [] for name in names}
    for step in range(num_steps):
        batch, truth = world.batch(step), CASES[case](step, world, NUM_RANKS, seed)
        weights_s = batch.weights_s(truth.factors)
        best = balanced(weights_s, batch.tokens[LLM], NUM_SLOTS, truth.slowness)
        best_s = height_s(weights_s, best, NUM_SLOTS, truth.slowness)
        for name, contender in contenders.items():
            slot = contender.plan(batch)
            regret[name].append(height_s(weights_s, slot, NUM_SLOTS, truth.slowness) / best_s - 1)
            is_on[name].append(contender.is_on)
            contender.learn(measured(batch, truth, slot, noise[name], noise_frac))
    for name in names:
        on = np.array(is_on[name])
        yield Run(
            case, noise_frac, name, seed,
            early_regret=float(np.mean(regret[name][EARLY])), last_regret=float(np.mean(regret[name][LAST])),
            first_on=int(on.argmax()) if on.any() else None, on_frac=float(on.mean()),
            num_switches=int(np.abs(np.diff(on.astype(int))).sum()),
        )  # fmt: skip


def measured(batch: Batch, truth: Truth, slot: Ints, rng: np.random.Generator, noise_frac: float) -> Times:
    """What ranks see of a step: the encoder on one rank, the LLM on `NUM_RANKS`."""
    loads = slot_loads(batch.weights_s(truth.factors), slot, NUM_SLOTS, truth.slowness)
    loads *= np.maximum(rng.normal(1.0, noise_frac, loads.shape), 0.1)
    found = []
    for column, module in enumerate(MODULES):
        expected_s = batch.expected_s(module, slot, NUM_SLOTS, len(truth.factors[module]))
        for b in np.flatnonzero(expected_s.sum(axis=1)).tolist():
            node = (module, 0, 0) if module == VISION else (module, 0, b % NUM_RANKS)
            found.append((b, StageTime(node, float(loads[b, column]), {module: expected_s[b]})))
    return found


def recovered(runs: Sequence[Run], attribute: str) -> float:
    """Share of what the misprediction costs without correction that the contender of `runs[1::2]` saves."""
    without, with_it = (float(np.mean([getattr(r, attribute) for r in runs[i::2]])) for i in range(2))
    return 1 - with_it / without
