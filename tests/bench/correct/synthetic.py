"""Regret of every way of correcting, under truths that are known: all times are simulated.

Every contender plans each global batch with what it learnt from the steps before, under its own plans. A plan's cost
is its slowest slot under the truth; regret is what that exceeds the plan of an oracle by, who knows the truth. Made
corrections are taken to cost no time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from dflop.correct.times import StageTime
from dflop.records import LLM
from dflop.schedule.items import Ints
from tests.bench.correct.balance import balanced, height_s, slot_loads
from tests.bench.correct.contenders import CONTENDERS, Times
from tests.bench.correct.worlds import CASES, MODULES, VISION, Batch, Truth, World

NUM_SAMPLES, NUM_SLOTS, NUM_RANKS, NUM_STEPS = 256, 32, 4, 120
NOISES = (0.05, 0.15)
EARLY, LAST = slice(5, 21), slice(-40, None)
MIN_RECOVERED, MAX_REGRET_WHEN_RIGHT = 0.85, 0.001
STATIC_CASES = (
    "one LLM bucket 2x", "encoder top buckets 2x", "LLM 1.5x", "all buckets lognormal .25", "slow rank 1.5x",
    "bucket 2x and slow rank 1.5x",
)  # fmt: skip
"""Where something is to be recovered from the first step on."""
HARMLESS_CASES = ("right",)
"""Where nothing is."""
LEVEL_CASES = ("right", "LLM 1.5x")
"""Where no size of items strays from its module, so that factors by size are of no use."""


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


def recovered(
    runs: Sequence[Run], case: str, noise_frac: float, contender: str, attribute: str = "early_regret"
) -> float:
    """Share of what the misprediction costs without correction that a contender saves, over all seeds."""
    regret = {
        name: np.mean(
            [getattr(r, attribute) for r in runs if (r.case, r.noise_frac, r.contender) == (case, noise_frac, name)]
        )
        for name in ("none", contender)
    }
    return float(1 - regret[contender] / regret["none"])


def targets(runs: Sequence[Run]) -> list[tuple[str, bool]]:
    """Targets of the gated estimator, in words, and whether each is met."""
    found = []
    for case in dict.fromkeys(r.case for r in runs):
        for noise_frac in dict.fromkeys(r.noise_frac for r in runs):
            ours = [r for r in runs if (r.case, r.noise_frac, r.contender) == (case, noise_frac, "ours")]
            name = f"{case}, noise {noise_frac:.0%}"
            if case in HARMLESS_CASES:
                worst = max(max(r.early_regret, r.last_regret) for r in ours)
                found.append((f"{name}: regret {worst:.2%}", worst <= MAX_REGRET_WHEN_RIGHT))
            if case in LEVEL_CASES:
                on_frac = max(r.on_frac for r in ours)
                found.append((f"{name}: gate on in {on_frac:.1%} of steps", on_frac == 0))
            if case in STATIC_CASES and noise_frac == min(NOISES):
                share = recovered(runs, case, noise_frac, "ours")
                found.append((f"{name}: {share:.0%} recovered", share >= MIN_RECOVERED))
    return found


def main(sizes: Path | None, seeds: Sequence[int]) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    """Simulates and prints; the figures, and the targets with whether each is met."""
    runs: list[Run] = []
    console = Console()
    cells = [(case, noise_frac) for case in CASES for noise_frac in NOISES]
    print("regret against an oracle, steps 5-20 / last 40, and the share of the loss that is recovered")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(_cell, *zip(*cells, strict=True), repeat(tuple(seeds)), repeat(sizes))
        for (case, noise_frac), of_cell in zip(
            track(cells, "cases", console=console, disable=not console.is_terminal), found, strict=True
        ):
            runs += of_cell
            console.print(_line(runs, case, noise_frac), highlight=False, soft_wrap=True)
    figures = {
        "simulated": True, "real_sizes": sizes is not None, "seeds": list(seeds), "num_samples": NUM_SAMPLES,
        "num_slots": NUM_SLOTS, "num_ranks": NUM_RANKS, "num_steps": NUM_STEPS, "runs": [asdict(run) for run in runs],
    }  # fmt: skip
    return figures, targets(runs)


def _cell(case: str, noise_frac: float, seeds: Sequence[int], sizes: Path | None) -> list[Run]:
    """All seeds of one case."""
    return [run for seed in seeds for run in simulate(case, noise_frac, seed, World(NUM_SAMPLES, seed, sizes))]


def _line(runs: Sequence[Run], case: str, noise_frac: float) -> str:
    """All contenders in one case, averaged over seeds; of the gate when it was first on, and how much of the time."""
    parts = [f"{case:28s} {noise_frac:4.0%}"]
    for name in CONTENDERS:
        found = [r for r in runs if (r.case, r.noise_frac, r.contender) == (case, noise_frac, name)]
        early, last = (float(np.mean([getattr(r, a) for r in found])) for a in ("early_regret", "last_regret"))
        saved = "" if name == "none" or case in HARMLESS_CASES else f" {_saved(runs, case, noise_frac, name)}"
        parts.append(f"{name} {early:6.2%} /{last:6.2%}{saved}")
        if name == "ours":
            first = ", ".join("never" if r.first_on is None else str(r.first_on) for r in found)
            parts.append(f"on from {first}, {np.mean([r.on_frac for r in found]):.0%} of steps")
    return "  |  ".join(parts)


def _saved(runs: Sequence[Run], case: str, noise_frac: float, name: str) -> str:
    """Shares recovered, early and late; late only where nothing is wrong at first."""
    shares = [
        f"{recovered(runs, case, noise_frac, name, a):.0%}"
        for a in ("early_regret", "last_regret")
        if case in STATIC_CASES or a == "last_regret"
    ]
    return f"({', '.join(shares)})"
