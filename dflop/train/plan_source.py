"""Where a rank gets the plan of each step, and what rank 0 does when the scheduler is late or dead.

Rank 0 asks for a plan when the step before it begins, so waiting for it costs nothing at first. It guards liveness:
while the scheduler keeps it waiting it makes a quick plan itself, and publishes it when its patience ends. The first
writer wins, so all ranks run the same plan, and the scheduler can slow nothing down but the quality of the packing.
Whoever made a plan, rank 0 hands it on to be recorded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from dflop.errors import TrainError
from dflop.records import StepPlan
from dflop.train import wire
from dflop.train.wire import PlanMessage, Store
from dflop.units import seconds

POLL_S = 0.005
NUM_TIMED_STEPS = 8


class Patience:
    """How long rank 0 waits for a scheduler that lives, so that no rank waits for rank 0.

    Args:
        start_s: For the first plan, when the scheduler may still be starting.
        frac: Later: this share of the shortest of the last steps, whose rest is left for decoding; None: always
            `start_s`.
    """

    def __init__(self, start_s: float, frac: float | None) -> None:
        self._start_s, self._frac = start_s, frac
        self._asked_at_s: list[float] = []
        self._steps_s: deque[float] = deque(maxlen=NUM_TIMED_STEPS)

    def asked(self, now_s: float, expected_step_s: float) -> float:
        """Seconds to wait for the plan that is asked for now.

        Args:
            now_s: Monotonic; steps are as long as from one asking to the next, the first apart.
            expected_step_s: Of the step that begins now; used until one was timed.
        """
        self._asked_at_s = [*self._asked_at_s[-2:], now_s]
        if len(self._asked_at_s) == 3:
            self._steps_s.append(now_s - self._asked_at_s[1])
        if self._frac is None or len(self._asked_at_s) == 1:
            return self._start_s
        return self._frac * min(self._steps_s, default=expected_step_s)


@dataclass(frozen=True, slots=True)
class Guard:
    """What rank 0 needs to do without the scheduler."""

    quick_plan: Callable[[int], PlanMessage]
    """Makes the plan of a step, in tenths of a second and without compiled code."""
    scheduler_is_alive: Callable[[], bool]
    patience: Patience
    on_event: Callable[[int, str, str], None]
    """Given a step, `scheduler_late` and how long a scheduler that lives was waited for before a quick plan ran."""
    on_plan: Callable[[StepPlan], None]
    """Given the plan of every step, by whomever it is."""


class PlanSource:
    """Plans of one rank, in step order.

    Args:
        store: The key-value store, to which one more connection is opened.
        rank: Global rank.
        timeout_s: How long to wait for anyone's plan.
        guard: On rank 0, and only there.
    """

    def __init__(self, store: Store, rank: int, *, timeout_s: float, guard: Guard | None = None) -> None:
        # A connection of its own: one that waits for a plan would make every other user of it wait too.
        self._store = wire.open_store(store.host, store.port, is_server=False, timeout_s=timeout_s)
        self._rank, self._timeout_s, self._guard = rank, timeout_s, guard
        self._expected_step_s = 0.0
        self._later: dict[int, PlanMessage] = {}
        """Plans that were looked at ahead; they take milliseconds to read, and do not change."""

    def get(self, step: int) -> PlanMessage:
        """The plan of `step`; blocks until someone published it.

        Args:
            step: Asked for in order, and at most one step ahead of the one that runs.

        Raises:
            TrainError: none came within the timeout.
        """
        if self._guard is not None:
            self._watch(self._guard, step)
        try:
            self._store.wait([wire.plan_key(step)], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise TrainError(
                f"no plan for step {step} after {self._timeout_s:g} s",
                where=f"rank {self._rank}",
                hint="rank 0 publishes plans when the scheduler does not: look at its log first",
            ) from error
        message = self._later.pop(step, None) or wire.published(self._store, step)
        assert message is not None
        self._expected_step_s = message.step_plan.predicted_step_s
        if self._guard is not None:
            self._guard.on_plan(message.step_plan)
        return message

    def published_after(self, step: int, num_steps: int) -> list[StepPlan]:
        """Plans of the steps right behind `step`, up to `num_steps`, that are there already; waits for nobody."""
        found = []
        for later in range(step + 1, step + 1 + num_steps):
            if (message := self._later.get(later) or wire.published(self._store, later)) is None:
                break
            self._later[later] = message
            found.append(message.step_plan)
        return found

    def _watch(self, guard: Guard, step: int) -> None:
        """Wait for the scheduler as long as that is free, then publish a quick plan."""
        wire.retire(self._store, step - 2)  # every rank has run it
        wire.note(self._store, wire.ASKED, step)
        asked_at_s = time.monotonic()
        patience_s = guard.patience.asked(asked_at_s, self._expected_step_s)
        quick: PlanMessage | None = None
        while not wire.is_published(self._store, step):
            # Made before it is needed: when patience ends it is there.
            quick = quick or guard.quick_plan(step)
            waited_s = time.monotonic() - asked_at_s
            is_alive = guard.scheduler_is_alive()
            if is_alive and waited_s < patience_s:
                time.sleep(POLL_S)
            elif wire.publish(self._store, quick):
                if is_alive:
                    why = f"not ready after {seconds(waited_s)}; using the fallback schedule"
                    guard.on_event(step, "scheduler_late", why)
                return
