"""Planner alone, scheduler alone, both."""

from __future__ import annotations

from collections.abc import Sequence

from dflop.jobs.suite.contest import BATCHES, OURS, TUNED
from tests.bench.claims.blind import mean_ratio
from tests.bench.claims.contests import OUR_PLAN, Outcome, run_arrival_plan
from tests.bench.claims.record import Claim, Expectation, Reading, by_seed
from tests.bench.claims.tasks import Found, Task
from tests.bench.claims.throughput import contest_task, contests
from tests.bench.claims.where import INTERNVIT_72B, LLAMA_8B, SIGLIP_7B, SIGLIP_32B, Where

MODELS, QUICK_MODELS = (LLAMA_8B, SIGLIP_32B, INTERNVIT_72B), (SIGLIP_7B, INTERNVIT_72B)
PAPER = {LLAMA_8B: "planner", SIGLIP_32B: "scheduler", INTERNVIT_72B: "equal"}
"""Which part is worth more (Fig. 10, secondary)."""
ALIKE = 0.05
"""Gains that differ by less are equal."""


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    wanted = _places(seeds, full)
    return [contest_task(where) for where in wanted] + [_arrival_task(where) for where in wanted]


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    outcomes = contests(found, _places(seeds, full))
    alone = {o.where: mean_ratio(o.step_s[TUNED], found[_arrival_task(o.where)]) for o in outcomes}
    planner = _reading("planner alone, plan made for arrival order", [(o, alone[o.where]) for o in outcomes])
    ours_blind = _reading(
        "planner alone, plan made for our scheduler", [(o, o.gain(TUNED, OUR_PLAN)) for o in outcomes]
    )
    scheduler = _reading("scheduler alone", [(o, o.gain(TUNED, BATCHES)) for o in outcomes])
    both = _reading("both", [(o, o.gain(TUNED)) for o in outcomes])
    agreed, told = verdicts(outcomes, alone)
    kept = Reading(
        "both / the better one alone",
        by_seed([(o.where.seed, o.gain(TUNED) / max(alone[o.where], o.gain(TUNED, BATCHES))) for o in outcomes]),
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
        (planner, ours_blind, scheduler, both, kept, agreed),
        (
            Expectation(planner, ">=", 1.0, _planner_reason(planner, scheduler)),
            Expectation(ours_blind, ">=", 1.0, _planner_reason(ours_blind, scheduler)),
            Expectation(kept, ">=", 1.0, "one part takes from the other what it gains"),
            Expectation(agreed, ">=", 1.0, _order_reason(planner, scheduler)),
        ),
        told,
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


def verdicts(outcomes: Sequence[Outcome], alone: dict[Where, float]) -> tuple[Reading, tuple[str, ...]]:
    """(share of the paper's statements that hold, per seed; per model what dominates)."""
    agrees: list[tuple[int, bool]] = []
    told = []
    for model in dict.fromkeys(o.where.model for o in outcomes):
        mine = [o for o in outcomes if o.where.model == model]
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


def _planner_reason(planner: Reading, scheduler: Reading) -> str:
    if planner.values and planner.mean < 1.0 < scheduler.mean:
        return (
            f"a layout by itself gains nothing over a tuned one here; batches do ({scheduler.mean:.2f}x), and the plan "
            "is chosen for them"
        )
    return "the tuned uniform layout is among the best for arrival order already"


def _order_reason(planner: Reading, scheduler: Reading) -> str:
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
