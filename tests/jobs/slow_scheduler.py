"""A scheduler whose full plans of the first steps are ready when somebody has published that of the next step."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from dflop.cost.model import CostModel
from dflop.jobs import scheduler
from dflop.jobs.scheduler import Scheduler
from dflop.jobs.steps import QUICK, StepSpec
from dflop.records import SampleShape
from dflop.train.wire import PlanMessage, Store, open_store, plan_key
from tests.jobs.disturbed import BEGINS

NUM_SLOW_STEPS = 6
LIMIT_S = 120


class SlowScheduler(Scheduler):
    """As described above."""

    def serve(self, store: Store) -> None:
        self._own = open_store(store.host, store.port, is_server=False, timeout_s=LIMIT_S)
        self._own.set(BEGINS, "")
        super().serve(store)

    def _message(
        self, step: int, spec: StepSpec, batch: list[SampleShape], cost: CostModel, compiled: bool
    ) -> PlanMessage:
        message = super()._message(step, spec, batch, cost, compiled)
        if step < NUM_SLOW_STEPS and spec.label != QUICK:
            # Of the next one: behind its own it would begin the next in time, and seem well.
            self._own.wait([plan_key(step + 1)], timedelta(seconds=LIMIT_S))
        return message


def main(*args: Any) -> None:
    scheduler.Scheduler = SlowScheduler  # type: ignore[misc]  # a test double
    scheduler.main(*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
