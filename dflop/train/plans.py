"""How StepPlans reach the ranks: a TCP key-value store that rank 0 serves and the scheduler process fills.

Keys: `plan/<step>` holds one JSON message, `seen/<step>/<rank>` an observation on its way to the scheduler. Rank 0
guards liveness: when the scheduler is dead or late it publishes the data-blind plan itself (first writer wins), so
the scheduler can slow nothing down but the quality of the packing. No file and no database is on this path.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dflop.errors import TrainError
from dflop.records import StepPlan, from_dict, to_dict

SpanKey = tuple[str, int, int, int]
"""(module, stage, dp rank, microbatch)."""


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """A StepPlan with the seconds the scheduler expects of every stage and microbatch."""

    step_plan: StepPlan
    predicted: Mapping[SpanKey, tuple[int, int, int, float, float]]
    """(items, tokens, sum of squared tokens, forward_s, backward_s)."""

    def encode(self) -> str:
        spans = [[*key, *value] for key, value in self.predicted.items()]
        return json.dumps({"step_plan": to_dict(self.step_plan), "predicted": spans})

    @classmethod
    def decode(cls, text: str | bytes) -> PlanMessage:
        data = json.loads(text)
        predicted = {(m, s, d, k): tuple(rest) for m, s, d, k, *rest in data["predicted"]}
        return cls(from_dict(StepPlan, data["step_plan"]), predicted)


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> dist.TCPStore:
    """Connect to (or serve) the key-value store; port 0 lets the server choose, see `store.port`."""
    return dist.TCPStore(host, port, is_master=is_server, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def publish(store: dist.TCPStore, message: PlanMessage) -> bool:
    """Publish a plan unless one is there already; True when this one counts."""
    text = message.encode()
    stored: bytes = store.compare_set(f"plan/{message.step_plan.step}", "", text)
    return stored == text.encode()


class PlanSource:
    """Where a rank gets the plan of each step.

    Args:
        store: The key-value store, to which one more connection is opened.
        rank: Global rank; rank 0 also guards the scheduler.
        fallback: Makes the data-blind plan of a step (rank 0 only).
        scheduler_is_alive: Whether waiting longer can help (rank 0 only).
        patience_s: How long rank 0 waits for a live scheduler.
        timeout_s: How long the other ranks wait for anyone.
        on_fallback: Told the message that was published instead of the scheduler's, and why.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        rank: int,
        *,
        fallback: Callable[[int], PlanMessage],
        scheduler_is_alive: Callable[[], bool],
        patience_s: float,
        timeout_s: float,
        on_fallback: Callable[[PlanMessage, str], None],
    ) -> None:
        # A connection of its own: one that waits for a plan would make every other user of it wait too.
        self._store = open_store(store.host, store.port, is_server=False, timeout_s=timeout_s)
        self._rank, self._fallback = rank, fallback
        self._is_alive, self._patience_s, self._timeout_s = scheduler_is_alive, patience_s, timeout_s
        self._on_fallback = on_fallback

    def get(self, step: int) -> PlanMessage:
        """The plan of `step`; blocks until someone published it.

        Args:
            step: Asked for in order, and at most one step ahead of the one that runs.

        Raises:
            TrainError: nobody did within the timeout.
        """
        key = f"plan/{step}"
        if self._rank == 0:
            # Every rank has run step - 2. Its plan makes room, its key stays: a late scheduler must still lose.
            self._store.set(f"plan/{step - 2}", "done")
            self._guard(key, step)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise TrainError(
                f"no plan for step {step} after {self._timeout_s:g} s",
                where=f"rank {self._rank}",
                hint="rank 0 publishes plans when the scheduler does not: look at its log first",
            ) from error
        return PlanMessage.decode(self._store.get(key))

    def _guard(self, key: str, step: int) -> None:
        deadline = time.monotonic() + self._patience_s
        while not self._store.check([key]):
            alive = self._is_alive()
            if alive and time.monotonic() < deadline:
                time.sleep(0.005)
                continue
            why = f"was not ready in {self._patience_s:g} s" if alive else "is not running"
            message = self._fallback(step)
            if publish(self._store, message):
                self._on_fallback(message, f"the scheduler {why}")


def send_observation(store: dist.TCPStore, step: int, rank: int, observation: Mapping[str, Any]) -> None:
    """Hand an observation to the scheduler; never waits for it."""
    store.set(f"seen/{step}/{rank}", json.dumps(observation))


def take_observation(store: dist.TCPStore, step: int, rank: int) -> dict[str, Any] | None:
    """An observation if it has arrived; removes it from the store."""
    key = f"seen/{step}/{rank}"
    if not store.check([key]):
        return None
    data: dict[str, Any] = json.loads(store.get(key))
    store.delete_key(key)
    return data
