"""What ranks and scheduler tell each other, on a TCP key-value store that rank 0 serves. No file, no database.

    plan/<step>          one message; the first writer wins, and what every rank has run makes room
    asked                the step whose plan rank 0 asked for last
    factors              corrections that the newest plans use, for quick plans
    learned              what the scheduler knows that its next start, or the job's, goes on from
    host/<rank>          name of the machine that a rank runs on
    seen/<slot>/<rank>   seconds that a rank measured, on their way to the scheduler

A slot is used again after `NUM_SLOTS` steps, so that nothing piles up while no scheduler takes them.

torch's store listens on all addresses when it is left to choose, and asks nobody for a password. Whoever reaches it can
change plans, and where ranks look for one another. So it gets a socket that is bound already: to the loopback device
where all ranks are on one machine, else to the address by which the others know rank 0.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, islice
from typing import Any

import numpy as np
import torch.distributed as dist

from dflop.records import ModuleWork, StepObservation, StepPlan, from_dict, to_dict

Store = dist.TCPStore
NUM_SLOTS = 16
"""More than any scheduler is ahead."""
RETIRED = "done"
LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
ASKED, FACTORS, LEARNED, HOST = "asked", "factors", "learned", "host/{}"
"""Keys of what is noted."""

Node = tuple[str, int, int]
"""(module, stage, dp rank)."""
Predicted = tuple[int, int, int, float, float]
"""(items, tokens, sum of squared tokens, forward_s, backward_s)."""
_INDEX, _COUNT = np.dtype("<i8"), np.dtype("<i4")
_SPAN = np.dtype("<i8, <i8, <i8, <i8, <f8, <f8")
"""How numbers travel; the last is a microbatch with what is predicted of it."""
_NUMBERS = ("item_sample", "item_rank_in_sample", "item_rows")


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """A StepPlan with the seconds the scheduler expects of every stage and microbatch.

    Every rank reads the plan of the whole global batch next to the thread that launches kernels, so numbers travel as
    arrays: JSON of them takes ten times as long.
    """

    step_plan: StepPlan
    spans: Mapping[str, str] = field(default_factory=dict)
    """By `module/stage/dp_rank`, packed: a rank reads its own and leaves the others as they came."""

    @classmethod
    def of(cls, step_plan: StepPlan, predicted: Mapping[Node, Sequence[tuple[int, *Predicted]]]) -> PlanMessage:
        """A message with rows of (microbatch, `Predicted`) for every node."""
        spans = {"{}/{}/{}".format(*node): _packed(rows, _SPAN) for node, rows in predicted.items()}
        return cls(step_plan, spans)

    def predicted(self, node: Node) -> dict[int, Predicted]:
        """What is predicted of one node's microbatches, by microbatch; empty where nothing is."""
        packed = self.spans.get("{}/{}/{}".format(*node), "")
        return {microbatch: (*values,) for microbatch, *values in _unpacked(packed, _SPAN)}

    def encode(self) -> str:
        plan = self.step_plan
        data = to_dict(replace(plan, sample_index=(), work=()))
        data["sample_index"] = _packed(plan.sample_index, _INDEX)
        data["work"] = [_packed_work(work) for work in plan.work]
        return json.dumps({"step_plan": data, "predicted": self.spans})

    @classmethod
    def decode(cls, text: str | bytes) -> PlanMessage:
        data = json.loads(text)
        fields = data["step_plan"]
        sample_index, work = tuple(_unpacked(fields["sample_index"], _INDEX)), map(_unpacked_work, fields["work"])
        rest = from_dict(StepPlan, {**fields, "sample_index": (), "work": ()})
        return cls(replace(rest, sample_index=sample_index, work=tuple(work)), data["predicted"])


def _packed(values: Sequence[Any], dtype: np.dtype[Any]) -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def _unpacked(text: str, dtype: np.dtype[Any]) -> list[Any]:
    values: list[Any] = np.frombuffer(base64.b64decode(text), dtype).tolist()
    return values


def _packed_work(work: ModuleWork) -> dict[str, Any]:
    slots = [ids for by_replica in work.owner for ids in by_replica]
    numbers = {name: _packed(getattr(work, name), _COUNT) for name in _NUMBERS}
    sizes, owner = _packed([*map(len, slots)], _COUNT), _packed([*chain.from_iterable(slots)], _COUNT)
    return {"module": work.module, **numbers, "sizes": sizes, "owner": owner, "num_replicas": len(work.owner[0])}


def _unpacked_work(data: Mapping[str, Any]) -> ModuleWork:
    ids = iter(_unpacked(data["owner"], _COUNT))
    slots = [tuple(islice(ids, size)) for size in _unpacked(data["sizes"], _COUNT)]
    per_microbatch = data["num_replicas"]
    owner = tuple(tuple(slots[i : i + per_microbatch]) for i in range(0, len(slots), per_microbatch))
    numbers = {name: tuple(_unpacked(data[name], _COUNT)) for name in _NUMBERS}
    return ModuleWork(data["module"], owner=owner, **numbers)


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What a scheduler learns from of one rank's step: a part of its `StepObservation`, because this is sent."""

    step: int
    rank: int
    step_s: float
    compute_s: tuple[tuple[int, float], ...]
    """(microbatch, its forward and backward) of those that the rank had work in."""
    stretch: float = 1.0
    """Seconds that passed in them per compute second: more than 1 where the rank did not have its processor."""

    @classmethod
    def of(cls, seen: StepObservation) -> RankTimes:
        """The part of an observation."""
        spans = tuple((s.microbatch, s.forward_compute_s + s.backward_compute_s) for s in seen.spans)
        return cls(seen.step, seen.rank, seen.step_s, spans, seen.wall_to_compute)


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> Store:
    """Connect to a key-value store, or serve one where the others look for it.

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


def master_host(environ: Mapping[str, str]) -> str:
    """Where rank 0 is, as the others reach it.

    Args:
        environ: Of a rank.
    """
    is_one_machine = environ.get("LOCAL_WORLD_SIZE", "") == environ.get("WORLD_SIZE")
    return LOOPBACK if is_one_machine else environ["MASTER_ADDR"]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at the address by which other machines know this one.

    Where the name leads to the loopback device although ranks are elsewhere, or to no address of this machine (address
    translation, virtual addresses), no one address is right, and it listens on all of them, as torch would.

    Raises:
        OSError: the port is taken.
    """
    found = []
    with contextlib.suppress(OSError):  # a name that leads nowhere
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    for family, _, _, _, (address, *_) in found:
        with contextlib.suppress(OSError):
            if host != LOOPBACK and str(address).startswith(("127.", "::1")):
                continue
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


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


def note(store: Store, key: str, value: Any) -> None:
    """Set a key that one process writes and others may read, to a JSON value."""
    store.set(key, json.dumps(value))


def noted(store: Store, key: str, default: Any) -> Any:
    """What was noted last; `default` where nothing was yet."""
    return json.loads(store.get(key)) if store.check([key]) else default


def first_unpublished(store: Store, first: int, end: int) -> int:
    """First step of `[first, end)` that nobody has published a plan of; `end` where there is none."""
    # Rank 0 asks in order: what it asked for before has been published by somebody.
    step = max(first, int(noted(store, ASKED, -1)))
    while step < end and is_published(store, step):
        step += 1
    return step


def send_times(store: Store, times: RankTimes) -> None:
    """Hand what a rank measured to the scheduler; never waits for it."""
    note(store, _slot_key(times.step, times.rank), to_dict(times))


def take_times(store: Store, step: int, num_ranks: int) -> list[RankTimes] | None:
    """What ranks measured of a step, None until every rank has sent it; removes it.

    What a later step has overwritten, because nobody took it in time, is missing.
    """
    keys = [_slot_key(step, rank) for rank in range(num_ranks)]
    if not store.check(keys):
        return None
    found = [from_dict(RankTimes, json.loads(text)) for text in store.multi_get(keys)]
    if any(times.step < step for times in found):
        return None
    for key, times in zip(keys, found, strict=True):
        if times.step == step:
            store.delete_key(key)
    return [times for times in found if times.step == step]


def _slot_key(step: int, rank: int) -> str:
    return f"seen/{step % NUM_SLOTS}/{rank}"
