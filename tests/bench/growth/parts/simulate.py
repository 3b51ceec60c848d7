"""The simulator: one step by microbatches, stages and ranks."""

from __future__ import annotations

from pathlib import Path

from dflop.records import LLM, Plan
from dflop.schedule.items import module_items, stage_durations
from dflop.schedule.scheduler import schedule_step
from dflop.simulate.events import simulate, simulate_reference
from dflop.simulate.step import step_graph
from tests.bench.growth.part import Part, Work
from tests.builders import make_cost, make_inline_plan, make_plan, random_batch

COST = make_cost("vision")
BY_OPS = "a pass over operations, each when what it waits for is done"


def step_of(plan: Plan, num_samples: int, max_concurrency: int | None = None) -> Work:
    """Graph and simulation of a step in arrival order; with so few cores that processes share them, if that is said."""
    batch = random_batch(num_samples, encoders=("vision",), seed=3)
    found = schedule_step(run_id="", step=0, plan=plan, batch=batch, cost=COST, policy="arrival")
    owners = {w.module: w.owner for w in found.work}
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    durations = stage_durations(plan, items, owners, COST.extrapolating())
    if max_concurrency is None:
        return lambda: simulate(step_graph(plan, found.work, durations))
    return lambda: simulate_reference(step_graph(plan, found.work, durations), max_concurrency=max_concurrency)


def by_microbatches(size: int, _folder: Path) -> Work:
    return step_of(make_plan({"vision": 2, LLM: 2}, llm_pp=4, num_microbatches=size, global_batch_size=size), size)


def by_ranks(size: int, _folder: Path) -> Work:
    return step_of(make_plan({"vision": 2, LLM: size}, num_microbatches=8, global_batch_size=8 * size), 8 * size)


def on_few_cores(size: int, _folder: Path) -> Work:
    plan = make_plan({"vision": 1, LLM: size}, num_microbatches=4, global_batch_size=4 * size)
    return step_of(plan, 4 * size, max_concurrency=2)


def by_stages(size: int, _folder: Path) -> Work:
    plan = make_inline_plan(1, pp=size, num_microbatches=16)
    return step_of(plan, 64)


PARTS = (
    Part("simulator by microbatches", (32, 320, 3_200), by_microbatches, 1.0, BY_OPS),
    Part("simulator by replicas", (8, 80, 800), by_ranks, 1.0, BY_OPS),
    Part("simulator by stages", (4, 40, 400), by_stages, 1.0, BY_OPS),
    Part(
        "simulator on two cores by replicas",
        (4, 40, 400),
        on_few_cores,
        2.0,
        "processes share cores: every start and end changes the speed of all that compute",
    ),
)
