"""GPU idle time, and why the step's time is the better figure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dflop.jobs.suite.contest import BATCHES, OURS, TUNED
from tests.bench.claims.contests import PAIRED, Outcome
from tests.bench.claims.record import Claim, Expectation, Reading
from tests.bench.claims.tasks import Found, Task
from tests.bench.claims.throughput import contests, places
from tests.bench.claims.throughput import tasks as throughput_tasks

PAPER = 0.84
LESS_WORK = 0.98
"""A layout that spends less than this part of another's GPU-seconds spares work, not waiting."""
MIN_DIFFERENCE = 0.01
"""Steps or idle shares closer than this are alike."""


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    return throughput_tasks(seeds, full)


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    outcomes = contests(found, places(seeds, full))
    same_plan = Reading("cut by order alone, same plan", _cuts(outcomes, BATCHES), "%", "simulated")
    whole = Reading("cut by plan and order", _cuts(outcomes, OURS), "%", "simulated")
    best = Reading("largest cut of a model", _largest(outcomes), "%", "simulated")
    misled, pairs, worst = misleading_pairs(outcomes)
    return Claim(
        "idle",
        "GPUs idle 84 % less.",
        "Idle seconds per step of all 64 GPUs, those without work included, uniform tuned against ours on the same "
        "unseen batches.",
        "82 to 84 % less (secondary)",
        (whole, same_plan, best),
        (Expectation(whole, ">=", PAPER, reason(outcomes)),),
        (
            f"step time is the better figure: of {pairs} pairs of plans for the same batches whose steps and idle "
            f"shares differ by more than {MIN_DIFFERENCE:.0%}, the one that idles less is the slower one in {misled} "
            f"({misled / max(pairs, 1):.0%}){worst}",
        ),
        tuple(
            {
                "model": o.where.case.name, "data": o.where.mixture, "seed": o.where.seed,
                "idle_frac": {n: o.idle_frac[n] for n in PAIRED if n in o.idle_frac},
                "step_s": {n: o.mean_s(n) for n in PAIRED if n in o.step_s},
                "cut": 1 - o.idle_s(OURS) / o.idle_s(TUNED), "cut_same_plan": 1 - o.idle_s(BATCHES) / o.idle_s(TUNED),
            }
            for o in outcomes
        ),
    )  # fmt: skip


def misleading_pairs(outcomes: Sequence[Outcome]) -> tuple[int, int, str]:
    """(pairs that idle shares rank against their step times, all pairs that differ, the worst in words)."""
    misled, pairs, worst = 0, 0, (1.0, "")
    for o in outcomes:
        for a, b in itertools.combinations([n for n in PAIRED if n in o.step_s], 2):
            idle = o.idle_frac[a] - o.idle_frac[b]
            ratio = o.mean_s(a) / o.mean_s(b)
            if abs(idle) <= MIN_DIFFERENCE or abs(ratio - 1) <= MIN_DIFFERENCE:
                continue
            pairs += 1
            if (idle < 0) == (ratio < 1):
                continue
            misled += 1
            lazy, busy = (a, b) if idle > 0 else (b, a)
            slower = o.mean_s(busy) / o.mean_s(lazy)
            told = (
                f"; the worst: {o.where.name}: {busy} idles {o.idle_frac[busy]:.0%} and takes {slower:.2f}x as long as "
                f"{lazy}, which idles {o.idle_frac[lazy]:.0%}, because it spends more GPU-seconds on the same work"
            )
            worst = max(worst, (slower, told))
    return misled, pairs, worst[1]


def reason(outcomes: Sequence[Outcome]) -> str:
    """What keeps idle time from falling further, by where the cut is smallest."""
    weakest = min(outcomes, key=lambda o: 1 - o.idle_s(OURS) / o.idle_s(TUNED))
    cut = 1 - weakest.idle_s(OURS) / weakest.idle_s(TUNED)
    faster = weakest.gain(TUNED)
    first = weakest.idle_frac[TUNED]
    told = f"the cut is smallest, {cut:.0%}, where uniform tuned idles {first:.0%} at first ({weakest.where.name})"
    if faster <= 1:
        return f"{told}; the step there is no faster either"
    busy = [(1 - weakest.idle_frac[name]) * weakest.mean_s(name) for name in (TUNED, OURS)]
    if busy[1] < LESS_WORK * busy[0]:
        spared = 1 - busy[1] / busy[0]
        return (
            f"{told}; the step there is {faster:.2f}x as fast, by a layout that spends {spared:.0%} fewer GPU-seconds"
        )
    return f"{told}; the step there is {faster:.2f}x as fast"


def _cuts(outcomes: Sequence[Outcome], name: str) -> tuple[float, ...]:
    """1 - idle seconds of `name` / of uniform tuned, mean over places, a value per seed."""
    seeds = sorted({o.where.seed for o in outcomes})
    cuts = {s: [1 - o.idle_s(name) / o.idle_s(TUNED) for o in outcomes if o.where.seed == s] for s in seeds}
    return tuple(sum(values) / len(values) for values in cuts.values())


def _largest(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    seeds = sorted({o.where.seed for o in outcomes})
    return tuple(max(1 - o.idle_s(OURS) / o.idle_s(TUNED) for o in outcomes if o.where.seed == s) for s in seeds)
