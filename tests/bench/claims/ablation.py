"""Planner alone, scheduler alone, both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from dflop.jobs.suite.contest import BATCHES, OURS, TUNED
from tests.bench.claims.blind import mean_ratio
from tests.bench.claims.contests import OUR_PLAN, TUNED_CHARGED, Outcome, run_arrival_plan
from tests.bench.claims.record import Claim, Expectation, Reading, by_seed
from tests.bench.claims.tasks import Found, Task
from tests.bench.claims.throughput import contest_task, contests
from tests.bench.claims.where import INTERNVIT_72B, LLAMA_8B, SIGLIP_7B, SIGLIP_32B, Where

MODELS, QUICK_MODELS = (LLAMA_8B, SIGLIP_32B, INTERNVIT_72B), (SIGLIP_7B, INTERNVIT_72B)
PAPER = {LLAMA_8B: "planner", SIGLIP_32B: "scheduler", INTERNVIT_72B: "equal"}
"""Which part is worth more (Fig. 10, secondary)."""
_HINDSIGHT = (
    "the baseline is the fastest layout that turns out to hold the very batches it is judged on; a planner has to "
    "leave room for batches that it has not seen"
)
ALIKE = 0.05
"""Gains that differ by less are equal."""


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    wanted = _places(seeds, full)
    return [contest_task(where) for where in wanted] + [_arrival_task(where) for where in wanted]


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    outcomes = contests(found, _places(seeds, full))
    alone = {o.where: _gain_alone(o, found[_arrival_task(o.where)]) for o in outcomes}
    fitting = [(o, alone[o.where]) for o in outcomes if not math.isnan(alone[o.where])]
    planner = _reading("planner alone, plan made for arrival order", fitting)
    charged = _reading(
        "the same, over uniform tuned that is charged for its memory",
        [(o, g) for o in outcomes if (g := _gain_alone(o, found[_arrival_task(o.where)], TUNED_CHARGED)) == g],
    )
    ours_blind = _reading(
        "planner alone, plan made for our scheduler", [(o, o.gain(TUNED, OUR_PLAN)) for o in outcomes]
    )
    scheduler = _reading("scheduler alone", [(o, o.gain(TUNED, BATCHES)) for o in outcomes])
    both = _reading("both", [(o, o.gain(TUNED)) for o in outcomes])
    agreed, told = verdicts(outcomes, alone)
    kept = Reading(
        "both / the better one alone",
        by_seed([(o.where.seed, o.gain(TUNED) / _better(alone[o.where], o.gain(TUNED, BATCHES))) for o in outcomes]),
        "x", "simulated",
    )  # fmt: skip
    return Claim(
        "ablation",
        "Planner and scheduler both count: the planner more for 8B, the scheduler more for 32B, both alike for "
        "InternVL.",
        "Uniform tuned in arrival order as it is; with our plan only, in arrival order; with our batches only; both. "
        "A plan made for our scheduler relies on it, so the planner alone is also told with a plan made for arrival "
        "order.",
        "8B planner, 32B scheduler, InternVL equal (Fig. 10, secondary)",
        (planner, charged, ours_blind, scheduler, both, kept, agreed),
        (
            Expectation(planner, ">=", 1.0, _planner_reason(outcomes, planner, scheduler)),
            Expectation(charged, ">=", 1.0, _HINDSIGHT),
            Expectation(ours_blind, ">=", 1.0, _planner_reason(outcomes, ours_blind, scheduler)),
            Expectation(kept, ">=", 1.0, "one part takes from the other what it gains"),
            Expectation(agreed, ">=", 1.0, _order_reason(planner, scheduler)),
        ),
        (*told, *_without_plan(outcomes, alone)),
        tuple(
            {
                "model": o.where.case.name, "data": o.where.mixture, "seed": o.where.seed,
                "planner_for_arrival": alone[o.where], "planner": o.gain(TUNED, OUR_PLAN),
                "scheduler": o.gain(TUNED, BATCHES), "both": o.gain(TUNED),
                "layout_tuned": o.layout.get(TUNED, ""), "layout_ours": o.layout.get(OURS, ""),
            }
            for o in outcomes
        ),
    )  # fmt: skip


def _gain_alone(outcome: Outcome, step_s: Sequence[float] | None, over: str = TUNED) -> float:
    """Of the plan for arrival order over a baseline; NaN where no such plan, or baseline, holds its batches."""
    return mean_ratio(outcome.step_s[over], step_s) if step_s is not None and over in outcome.step_s else math.nan


def _better(planner: float, scheduler: float) -> float:
    return scheduler if math.isnan(planner) else max(planner, scheduler)


def _without_plan(outcomes: Sequence[Outcome], alone: dict[Where, float]) -> tuple[str, ...]:
    """Where the planner alone has no figure; the tuned baseline of these is not charged for its memory."""
    missing = Counter(o.where.case.name for o in outcomes if math.isnan(alone[o.where]))
    return tuple(
        f"{name}: no plan for arrival order holds its batches in memory with {count} of the seeds, which are left out "
        "where the planner is alone"
        for name, count in missing.items()
    )


def verdicts(outcomes: Sequence[Outcome], alone: dict[Where, float]) -> tuple[Reading, tuple[str, ...]]:
    """(share of the paper's statements that hold, per seed; per model what dominates)."""
    agrees: list[tuple[int, bool]] = []
    told = []
    for model in dict.fromkeys(o.where.model for o in outcomes):
        mine = [o for o in outcomes if o.where.model == model and not math.isnan(alone[o.where])]
        if not mine:
            continue
        found = [dominant(alone[o.where], o.gain(TUNED, BATCHES)) for o in mine]
        if model in PAPER:
            agrees += [(o.where.seed, f == PAPER[model]) for o, f in zip(mine, found, strict=True)]
        told.append(
            f"{mine[0].where.case.name}: {max(set(found), key=found.count)}"
            + (f" (paper: {PAPER[model]})" if model in PAPER else "")
        )
    seeds = sorted({seed for seed, _ in agrees})
    shares = tuple(sum(same for s, same in agrees if s == seed) / sum(s == seed for s, _ in agrees) for seed in seeds)
    return Reading("statements about which part counts more that hold", shares, "%", "simulated"), tuple(told)


def dominant(planner: float, scheduler: float) -> str:
    """Which gain is larger: `planner`, `scheduler` or `equal`."""
    if abs(planner - scheduler) < ALIKE:
        return "equal"
    return "planner" if planner > scheduler else "scheduler"


def _planner_reason(outcomes: Sequence[Outcome], planner: Reading, scheduler: Reading) -> str:
    over, of = sum(o.num_over_memory[TUNED] for o in outcomes), sum(len(o.step_s[TUNED]) for o in outcomes)
    if 2 * over > of:
        return f"the tuned layout takes more memory than there is in {over} of {of} of these batches, a planner may not"
    if planner.values and planner.mean < 1.0 < scheduler.mean:
        return (
            f"a layout by itself gains nothing over a tuned one here; batches do ({scheduler.mean:.2f}x), and the plan "
            "is chosen for them"
        )
    return "the tuned uniform layout is among the best for arrival order already"


def _order_reason(planner: Reading, scheduler: Reading) -> str:
    if not planner.values:
        return "no plan for arrival order holds its batches in memory"
    if scheduler.mean > planner.mean:
        return (
            f"over a baseline that is tuned by simulation the scheduler is worth {scheduler.mean:.2f}x and the planner "
            f"alone {planner.mean:.2f}x: tuning has taken what a planner would gain"
        )
    return f"the planner is worth {planner.mean:.2f}x and the scheduler {scheduler.mean:.2f}x"


def _places(seeds: Sequence[int], full: bool) -> list[Where]:
    return [Where(model, "main", seed) for model in (MODELS if full else QUICK_MODELS) for seed in seeds]


def _arrival_task(where: Where) -> Task:
    return Task(run_arrival_plan, (where,), f"{where.name}, plan for arrival order")


def _reading(what: str, gains: Sequence[tuple[Outcome, float]]) -> Reading:
    return Reading(what, by_seed([(o.where.seed, gain) for o, gain in gains]), "x", "simulated")
