"""The plan that runs when the scheduler delivers none: made by rank 0, at once, without anything compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dflop.config import Config
from dflop.cost.model import CostModel
from dflop.records import Factors, Plan, from_dict
from dflop.run.batches import QUICK, WARMUP, GlobalBatches, job_steps
from dflop.run.directory import RunDir
from dflop.train.wire import FACTORS, PlanMessage, Store, noted

if TYPE_CHECKING:
    from dflop.schedule.caps import Fill


class QuickPlanner:
    """Makes quick plans of a job's steps, with the corrections that the scheduler last had in force in the job's store.

    `on_exceeded` is told the step and the cap that its plan exceeds, where no quick plan keeps all of them.
    """

    def __init__(
        self, run: RunDir, config: Config, plan: Plan, mode: str, run_id: str, batches: GlobalBatches, store: Store,
        on_exceeded: Callable[[int, Fill], None] = lambda step, fill: None,
    ) -> None:  # fmt: skip
        self._plan, self._run_id, self._batches, self._store = plan, run_id, batches, store
        self._steps = job_steps(config, mode)
        self._cost = CostModel(run.cost_tables())
        cluster = config.cluster.spec()
        self._concurrency = cluster.max_concurrency if cluster.max_concurrency < plan.num_processes else None
        with _no_compiler():
            from dflop.schedule.caps import exceeded
            from dflop.schedule.step_scheduler import schedule_step
        self._schedule, self._exceeded, self._on_exceeded = schedule_step, exceeded, on_exceeded

    def __call__(self, step: int) -> PlanMessage:
        """The plan of one step; it predicts no spans, for which a rank that waits has no time."""
        spec = self._steps[step]
        policy = "arrival" if spec.policy == "arrival" else QUICK
        factors = from_dict(Factors, noted(self._store, FACTORS, {}))
        batch, cost = self._batches.at(spec.batch_step), self._cost.with_corrections(factors.by_module())
        step_plan = self._schedule(
            run_id=self._run_id, step=step, plan=self._plan, batch=batch, cost=cost, policy=policy,
            max_concurrency=self._concurrency, slowness=factors.by_node(),
        )  # fmt: skip
        if policy == QUICK and (fill := self._exceeded(self._plan, batch, step_plan)):
            self._on_exceeded(step, fill)
        return PlanMessage(replace(step_plan, policy=WARMUP if spec.label == WARMUP else policy), {})


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
