"""The plan that runs when the scheduler delivers none: made by rank 0, at once, without anything compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from dflop.config import Config
from dflop.cost.model import CostModel
from dflop.records import Factors, Plan, StepPlan, from_dict
from dflop.run.batches import QUICK, WARMUP, GlobalBatches, job_steps
from dflop.run.directory import RunDir
from dflop.train.wire import FACTORS, PlanMessage, Store, noted


def quick_planner(
    run: RunDir, config: Config, plan: Plan, mode: str, run_id: str, batches: GlobalBatches, store: Store,
    on_event: Callable[[int, str, str], None] = lambda step, kind, detail: None,
) -> Callable[[int], PlanMessage]:  # fmt: skip
    """What makes quick plans of a job's steps, with the corrections that the scheduler last had in force in the store.

    `on_event` is told (step, `memory_exceeded`, the cap that its plan exceeds) where no quick plan keeps all of them.
    """
    steps, tables, cluster = job_steps(config, mode), CostModel(run.cost_tables()), config.cluster.spec()
    concurrency = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
    with _no_compiler():
        from dflop.schedule.caps import exceeded
        from dflop.schedule.step_scheduler import schedule_step

    def quick_plan(step: int) -> PlanMessage:
        """The plan of one step; it predicts no spans, for which a rank that waits has no time."""
        spec = steps[step]
        policy = "arrival" if spec.policy == "arrival" else QUICK
        factors = from_dict(Factors, noted(store, FACTORS, {}))
        batch, cost = batches.at(spec.batch_step), tables.with_corrections(factors.by_module())
        step_plan = schedule_step(
            run_id=run_id, step=step, plan=plan, batch=batch, cost=cost, policy=policy, max_concurrency=concurrency,
            slowness=factors.by_node(),
        )  # fmt: skip
        if policy == QUICK and (fill := exceeded(plan, batch, step_plan)):
            on_event(step, "memory_exceeded", f"the fallback schedule puts {fill}")
        return PlanMessage(replace(step_plan, policy=WARMUP if spec.label == WARMUP else policy))

    return quick_plan


def validation_plans(run: RunDir, config: Config, plan: Plan, batches: GlobalBatches) -> list[StepPlan]:
    """Packed like steps, of all samples that are held out; their steps are -1, -2, ..."""
    tables, cluster = CostModel(run.cost_tables()), config.cluster.spec()
    concurrency = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
    with _no_compiler():
        from dflop.schedule.step_scheduler import schedule_step
    return [
        schedule_step(
            run_id=run.run_id, step=-1 - k, plan=plan, batch=batch, cost=tables, policy=QUICK,
            max_concurrency=concurrency,
        )
        for k, batch in enumerate(batches.validated)
    ]  # fmt: skip


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """Within it numba cannot be imported, which takes long: kernels run as plain Python (`dflop/simulate/jit.py`)."""
    if "numba" in sys.modules:
        yield
        return
    sys.modules["numba"] = None  # type: ignore[assignment]  # as the import system marks what must not be found
    try:
        yield
    finally:
        del sys.modules["numba"]
