"""What ranks and scheduler tell each other, on a TCP key-value store that rank 0 serves. No file, no database.

    plan/<step>          one message; the first writer wins, and what every rank has run makes room
    asked                the step whose plan rank 0 asked for last
    wanted               the step up to which plans must be on disk now
    recorded/<start>     plans of the scheduler's nth start are on disk up to this step
    factors              corrections that the newest plans use
    learned              what the scheduler knows that its next start, or the job's, goes on from
    host/<rank>          where a rank runs
    seen/<slot>/<rank>   seconds that a rank measured, on their way to the scheduler

A slot is used again after `NUM_SLOTS` steps, so that nothing piles up while no scheduler takes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from dflop.records import Factors, StepObservation, StepPlan, from_dict, to_dict
from dflop.train.listen import listen

T = TypeVar("T")
Store = dist.TCPStore
NUM_SLOTS = 16
"""More than any scheduler is ahead."""
RECORD_EVERY_STEPS = 16
"""Plans that the scheduler makes between two writes; rank 0 keeps twice as many, in case it dies between them."""
RETIRED = "done"

SpanKey = tuple[str, int, int, int]
"""(module, stage, dp rank, microbatch)."""


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """A StepPlan with the seconds the scheduler expects of every stage and microbatch."""

    step_plan: StepPlan
    predicted: Mapping[SpanKey, tuple[int, int, int, float, float]]
    """(items, tokens, sum of squared tokens, forward_s, backward_s)."""
    start: int = 0
    """Which start of the scheduler made it, from 1; 0: rank 0 did."""

    def encode(self) -> str:
        spans = [[*key, *value] for key, value in self.predicted.items()]
        return json.dumps({"step_plan": to_dict(self.step_plan), "predicted": spans, "start": self.start})

    @classmethod
    def decode(cls, text: str | bytes) -> PlanMessage:
        data = json.loads(text)
        predicted = {(m, s, d, k): tuple(rest) for m, s, d, k, *rest in data["predicted"]}
        return cls(from_dict(StepPlan, data["step_plan"]), predicted, data["start"])


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What a scheduler learns from of one rank's step: a part of its `StepObservation`, because this is sent."""

    step: int
    rank: int
    step_s: float
    compute_s: Mapping[int, float]
    """Forward and backward of every microbatch that the rank had work in."""
    stretch: float = 1.0
    """Seconds that passed in them per compute second: more than 1 where the rank did not have its processor."""

    @classmethod
    def of(cls, seen: StepObservation) -> RankTimes:
        """The part of an observation."""
        spans = {s.microbatch: s.forward_compute_s + s.backward_compute_s for s in seen.spans}
        passed_s, compute_s = sum(s.forward_s + s.backward_s for s in seen.spans), sum(spans.values())
        return cls(seen.step, seen.rank, seen.step_s, spans, passed_s / compute_s if compute_s > 0 else 1.0)

    def encode(self) -> str:
        return json.dumps([self.step, self.rank, self.step_s, self.stretch, *self.compute_s.items()])

    @classmethod
    def decode(cls, text: str | bytes) -> RankTimes:
        step, rank, step_s, stretch, *compute_s = json.loads(text)
        return cls(step, rank, step_s, dict(compute_s), stretch)


def encode(record: Any) -> str:
    """A record as the store takes it."""
    return json.dumps(to_dict(record))


def decode(cls: type[T], text: str | bytes) -> T:
    """Inverse of `encode`."""
    return from_dict(cls, json.loads(text))


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> Store:
    """Connect to a key-value store, or serve one where the others look for it (`listen.py`).

    Args:
        host: Where rank 0 is.
        port: 0 lets the server choose, see `store.port`.
        is_server: Whether this process serves it.
        timeout_s: Of whatever is asked of it.

    Raises:
        OSError: the port is taken.
    """
    timeout, listening = timedelta(seconds=timeout_s), None
    if is_server:
        made = listen(host, port)
        port, listening = made.getsockname()[1], made.detach()  # the store closes it
    return Store(host, port, is_master=is_server, timeout=timeout, wait_for_workers=False, master_listen_fd=listening)


def plan_key(step: int) -> str:
    """Key under which the plan of `step` is waited for."""
    return f"plan/{step}"


def publish(store: Store, message: PlanMessage) -> bool:
    """Publish a plan unless one is there already; True when this one counts."""
    text = message.encode()
    stored: bytes = store.compare_set(plan_key(message.step_plan.step), "", text)
    return stored == text.encode()


def is_published(store: Store, step: int) -> bool:
    """Whether anybody has published a plan of `step`."""
    return bool(store.check([plan_key(step)]))


def published(store: Store, step: int) -> PlanMessage | None:
    """The plan of `step`, by whomever; None where there is none yet, or none any more."""
    if not is_published(store, step):
        return None
    text = store.get(plan_key(step))
    return None if text == RETIRED.encode() else PlanMessage.decode(text)


def retire(store: Store, step: int) -> None:
    """Make room where every rank has run a plan; its key stays, so that a late scheduler still loses."""
    store.set(plan_key(step), RETIRED)


def note_asked(store: Store, step: int) -> None:
    """Rank 0 needs the plan of `step` next."""
    store.set("asked", str(step))


def asked_step(store: Store) -> int:
    """The step whose plan rank 0 asked for last; -1: none yet."""
    return int(store.get("asked")) if store.check(["asked"]) else -1


def first_unpublished(store: Store, first: int, end: int) -> int:
    """First step of `[first, end)` that nobody has published a plan of; `end` where there is none."""
    # Rank 0 asks in order: what it asked for before has been published by somebody.
    step = max(first, asked_step(store))
    while step < end and is_published(store, step):
        step += 1
    return step


def note_wanted(store: Store, step: int) -> None:
    """The job is about to leave the steps up to `step` behind for good."""
    store.set("wanted", str(step))


def wanted_record(store: Store) -> int:
    """Last step up to which plans must be on disk now; -1: none yet."""
    return int(store.get("wanted")) if store.check(["wanted"]) else -1


def note_recorded(store: Store, start: int, step: int) -> None:
    """Plans that a start of the scheduler made are on disk up to `step`."""
    store.set(f"recorded/{start}", str(step))


def recorded_step(store: Store, start: int) -> int:
    """Last step up to which the plans of a start of the scheduler are on disk; -1: none yet."""
    key = f"recorded/{start}"
    return int(store.get(key)) if store.check([key]) else -1


def note_factors(store: Store, factors: Factors) -> None:
    """Corrections that the newest plans use, for quick plans."""
    store.set("factors", encode(factors))


def factors_in_force(store: Store) -> Factors:
    """Corrections that the scheduler's newest plans use; none where it has not said so yet."""
    return decode(Factors, store.get("factors")) if store.check(["factors"]) else Factors()


def note_learned(store: Store, learned: Mapping[str, Any]) -> None:
    """What the scheduler has learnt, as JSON; only the scheduler knows what is in it."""
    store.set("learned", json.dumps(learned))


def learned(store: Store) -> dict[str, Any]:
    """What the scheduler noted last; empty: nothing yet."""
    return dict(json.loads(store.get("learned"))) if store.check(["learned"]) else {}


def note_host(store: Store, rank: int, host: str) -> None:
    """Name of the machine that a rank runs on, said once."""
    store.set(f"host/{rank}", host)


def host_of(store: Store, rank: int) -> str:
    """Name of the machine that a rank runs on; empty: it has not said so yet."""
    key = f"host/{rank}"
    return str(store.get(key).decode()) if store.check([key]) else ""


def send_times(store: Store, times: RankTimes) -> None:
    """Hand what a rank measured to the scheduler; never waits for it."""
    store.set(_slot_key(times.step, times.rank), times.encode())


def take_times(store: Store, step: int, num_ranks: int) -> list[RankTimes] | None:
    """What ranks measured of a step, None until every rank has sent it; removes it.

    What a later step has overwritten, because nobody took it in time, is missing.
    """
    keys = [_slot_key(step, rank) for rank in range(num_ranks)]
    if not store.check(keys):
        return None
    found = [RankTimes.decode(text) for text in store.multi_get(keys)]
    if any(times.step < step for times in found):
        return None
    for key, times in zip(keys, found, strict=True):
        if times.step == step:
            store.delete_key(key)
    return [times for times in found if times.step == step]


def _slot_key(step: int, rank: int) -> str:
    return f"seen/{step % NUM_SLOTS}/{rank}"
