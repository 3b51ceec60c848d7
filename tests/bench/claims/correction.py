"""From which rate of anomalies on does correcting predictions pay?

An anomaly: an item of the LLM takes longer than predicted. *By size*: all items whose size lies within a window, which
holds a share of all items and lies somewhere in the upper half of sizes; this is what kernels do that are slow for
some shapes, and it can be learnt. *At random*: items picked anew in every step; nothing about them can be learnt, and
what counts is that correcting does no harm.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.correct.times import StageTime
from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.items import Ints
from tests.bench.claims.record import Claim, Expectation, Reading
from tests.bench.claims.tasks import Found, Task
from tests.bench.correct.balance import balanced, height_s, slot_loads
from tests.bench.correct.contenders import Gated, Times, Uncorrected
from tests.bench.correct.worlds import MODULES, VISION, Batch, World

RATES, DELAYS = (0.0, 0.01, 0.03, 0.05, 0.10), (0.25, 0.5, 1.0)
QUICK_RATES, QUICK_DELAYS = (0.0, 0.03, 0.10), (0.5,)
BY_SIZE, AT_RANDOM = "by size", "at random"
NUM_SAMPLES, NUM_SLOTS, NUM_RANKS, NUM_STEPS, NUM_LAST = 256, 32, 4, 80, 40
NOISE_FRAC = 0.05
PAPER_RATE, PAPER_OVERHEAD = 0.03, 0.04
DELAY = 0.5
"""At which the paper's rate is tested; its figures begin at a delay of 25 %."""
PAYS, HARMLESS = 0.001, -0.001
"""Of a step: gains from here on are gains, losses down to here are none."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """One world; means over its last steps."""

    kind: str
    rate: float
    delay: float
    seed: int
    gain: float
    """Of a step: 1 - corrected / uncorrected, before what correcting takes."""
    best_gain: float
    """Of one who knows."""
    overhead: float
    """Processor seconds of learning and judging over a step's seconds, as if nothing of it was hidden."""
    on_frac: float
    """Steps in which the gate was open, of all."""

    @property
    def net_gain(self) -> float:
        return self.gain - self.overhead


def run_correction(kind: str, rate: float, delay: float, seed: int, num_steps: int = NUM_STEPS) -> Corrected:
    """Plans and learns step by step, with and without correction, on the same batches."""
    world = World(NUM_SAMPLES, seed)
    rng, noise = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
    window = size_window(world, rate, rng)
    plain, ours = Uncorrected(world, NUM_SLOTS, NUM_RANKS), Gated(world, NUM_SLOTS, NUM_RANKS)
    ones = {m: np.ones(len(world.edges[m]) + 1) for m in MODULES}
    alike = np.ones(NUM_RANKS)
    steps, is_on = np.zeros((3, num_steps)), np.zeros(num_steps, dtype=bool)
    overhead_s = np.zeros(num_steps)
    for step in range(num_steps):
        batch = world.batch(step)
        slow = slowed(batch, kind, rate, delay, window, rng)
        weights_s = slow.weights_s(ones)
        started = time.process_time()
        without = plain.plan(batch)
        plain_s = time.process_time() - started
        started = time.process_time()
        slot = ours.plan(batch)
        overhead_s[step] = time.process_time() - started - plain_s
        is_on[step] = ours.is_on
        best = balanced(weights_s, batch.tokens[LLM], NUM_SLOTS, alike)
        steps[:, step] = [height_s(weights_s, s, NUM_SLOTS, alike) for s in (without, slot, best)]
        times = stage_times(batch, slow, slot, ones, noise)
        started = time.process_time()
        ours.learn(times)
        overhead_s[step] += time.process_time() - started
    last = slice(-min(NUM_LAST, num_steps), None)
    plain_mean, ours_mean, best_mean = steps[:, last].mean(axis=1)
    step_s = ours_mean * NUM_SLOTS / NUM_RANKS
    return Corrected(
        kind, rate, delay, seed, 1 - ours_mean / plain_mean, 1 - best_mean / plain_mean,
        max(0.0, float(np.median(overhead_s[last]))) / step_s, float(is_on.mean()),
    )  # fmt: skip


def size_window(world: World, rate: float, rng: np.random.Generator) -> tuple[float, float]:
    """Sizes of the LLM's items that hold this share of all of them, somewhere in the upper half."""
    tokens = np.sort(np.concatenate([world.batch(-2 - i).tokens[LLM] for i in range(10)]))
    low = rng.uniform(0.5, 1.0 - rate)
    return float(np.quantile(tokens, low)), float(np.quantile(tokens, low + rate))


def slowed(
    batch: Batch, kind: str, rate: float, delay: float, window: tuple[float, float], rng: np.random.Generator
) -> Batch:
    """The batch as it really runs."""
    tokens = batch.tokens[LLM]
    by_size = (tokens >= window[0]) & (tokens < window[1])
    is_slow = rng.random(len(tokens)) < rate if kind == AT_RANDOM else by_size
    seconds = batch.seconds[LLM] * np.where(is_slow, 1 + delay, 1.0)
    return dataclasses.replace(batch, seconds={**batch.seconds, LLM: seconds})


def stage_times(batch: Batch, slow: Batch, slot: Ints, ones: dict[str, Floats], rng: np.random.Generator) -> Times:
    """What ranks see: seconds as they are, with noise, beside what was predicted."""
    loads = slot_loads(slow.weights_s(ones), slot, NUM_SLOTS, np.ones(NUM_RANKS))
    loads *= np.maximum(rng.normal(1.0, NOISE_FRAC, loads.shape), 0.1)
    found = []
    for column, module in enumerate(MODULES):
        expected_s = batch.expected_s(module, slot, NUM_SLOTS, len(ones[module]))
        for b in np.flatnonzero(expected_s.sum(axis=1)).tolist():
            node = (module, 0, 0) if module == VISION else (module, 0, b % NUM_RANKS)
            found.append((b, StageTime(node, float(loads[b, column]), {module: expected_s[b]})))
    return found


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    return [_task(*cell, seed) for cell in cells(full) for seed in seeds]


def cells(full: bool) -> list[tuple[str, float, float]]:
    """(kind, rate, delay)."""
    rates, delays = (RATES, DELAYS) if full else (QUICK_RATES, QUICK_DELAYS)
    found = [(BY_SIZE, 0.0, 0.0)] + [(BY_SIZE, r, d) for r in rates if r for d in delays]
    return [*found, *((AT_RANDOM, r, DELAY) for r in rates if r)]


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    worlds = {cell: [found[_task(*cell, seed)] for seed in seeds] for cell in cells(full)}
    net = {cell: Reading(_name(*cell), tuple(w.net_gain for w in of), "%", "simulated") for cell, of in worlds.items()}
    overhead = Reading(
        "most that correcting takes, of a step",
        tuple(max(of[i].overhead for of in worlds.values()) for i in range(len(seeds))), "%", "measured over simulated",
    )  # fmt: skip
    at_paper = (BY_SIZE, PAPER_RATE, DELAY)
    pays = [cell for cell in worlds if cell[0] == BY_SIZE and cell[1] and net[cell].mean > PAYS]
    first = min((c[1] for c in pays), default=None)
    return Claim(
        "correction",
        "Correcting predictions at run time pays from 3 % anomalies on.",
        f"{NUM_STEPS} steps of {NUM_SAMPLES} samples, {NUM_SLOTS} microbatches on {NUM_RANKS} ranks, {NOISE_FRAC:.0%} "
        "noise; items whose sizes lie in a window, or items at random, take longer than predicted. Net gain: the "
        f"slowest microbatch without / with correction, last {NUM_LAST} steps, less what learning takes as if it was "
        "not hidden beside training.",
        "pays from a rate of 3 % and a delay of 25 % on; takes less than 4 % (Fig. 15, secondary)",
        (*net.values(), overhead),
        (
            Expectation(net[at_paper], ">=", PAYS, reason(worlds[at_paper])),
            Expectation(net[BY_SIZE, 0.0, 0.0], ">=", HARMLESS, "correcting costs where nothing is wrong"),
            *(
                Expectation(net[c], ">=", HARMLESS, "what cannot be learnt is taken for a pattern")
                for c in worlds
                if c[0] == AT_RANDOM
            ),
            Expectation(overhead, "<=", PAPER_OVERHEAD, "learning takes long beside so short a step"),
        ),
        (
            f"pays ({PAYS:.1%} of a step or more, mean over seeds) in {len(pays)} of "
            f"{sum(c[0] == BY_SIZE and c[1] > 0 for c in worlds)} cells by size"
            + (f", from a rate of {first:.0%} on" if first is not None else ""),
        ),
        tuple({**dataclasses.asdict(w), "net_gain": w.net_gain} for of in worlds.values() for w in of),
    )


def reason(worlds: Sequence[Corrected]) -> str:
    """Why nothing is gained: there is nothing to gain, or the gate stays shut, or it is not learnt well enough."""
    best = sum(w.best_gain for w in worlds) / len(worlds)
    on = sum(w.on_frac for w in worlds) / len(worlds)
    if best < 2 * PAYS:
        return f"one who knows would gain {best:.2%}: so few slow items hardly change the slowest microbatch"
    if on < 0.1:
        return (
            f"one who knows would gain {best:.2%}; the gate is open in {on:.0%} of steps, for it cannot tell such a "
            "gain from noise"
        )
    return f"one who knows would gain {best:.2%}; the window is narrower than the buckets that factors are learnt for"


def _name(kind: str, rate: float, delay: float) -> str:
    return f"net gain, {rate:.0%} {kind}, {delay:.0%} slower" if rate else "net gain, no anomalies"


def _task(kind: str, rate: float, delay: float, seed: int) -> Task:
    return Task(run_correction, (kind, rate, delay, seed), f"correction: {_name(kind, rate, delay)}, seed {seed}")
