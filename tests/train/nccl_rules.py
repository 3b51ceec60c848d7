"""Whether the messages of a step obey NCCL's rules, worked out from what each rank's engine asks for, without a GPU.

NCCL buffers nothing that can be relied on: a send ends when its receive has begun. Operations of one communicator run
in the order in which a rank asks for them, on a stream of its own that first waits for what the rank's compute stream
was given before; `Work.wait` lets the compute stream wait. Outside groups of calls torch gives every pair of ranks of a
process group a communicator (`ProcessGroupNCCL::pointToPoint`). Streams share the device's work queues
(CUDA_DEVICE_MAX_CONNECTIONS, 8): with one of them an operation begins after all that were asked for before have begun.
A step that ends even so ends under any number of queues.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dflop.parallel.topology import Seat, seats
from dflop.records import Plan

Kind = Literal["compute", "send", "receive", "wait"]
Communicators = Literal["pairs", "groups"]
"""One for each pair of ranks in a process group, or one for all of it (`init_process_group(device_id=...)`)."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank asks its device for."""

    kind: Kind
    group: str = ""
    """Process group of a message."""
    peer: int = -1
    message: Hashable = None
    """What both ends know of a message: (tag, rows); of `compute` the action; of `wait` the index of a message."""


Calls = Mapping[int, Sequence[Call]]
"""By rank, in the order in which it asks."""


def broken(plan: Plan, calls: Calls) -> list[str]:
    """What breaks a rule; empty: nothing does."""
    return [*mismatches(calls), *unequal_groups(plan, calls)] or stuck(plan, calls)


def mismatches(calls: Calls) -> Iterator[str]:
    """Pairs of ranks whose ends of a group's messages in one direction are not the same ones in the same order."""
    for (group, source, target), (sent, received) in _ends(calls).items():
        one, other = ([calls[r][n].message for n in of] for r, of in ((source, sent), (target, received)))
        if one != other:
            yield f"{group}: rank {source} sends {one}, rank {target} receives {other}"


def unequal_groups(plan: Plan, calls: Calls) -> Iterator[str]:
    """Ranks whose passes hold collectives of them all, and that do not run the same passes in the same order."""
    for members in sync_groups(plan):
        found = {rank: [c.message for c in calls[rank] if c.kind == "compute"] for rank in members}
        if any(actions != found[members[0]] for actions in found.values()):
            yield f"ranks {members}: {found}"


def sync_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks whose collectives are inside their passes: tensor, context, expert parallelism, shared parameters."""
    found = defaultdict[Hashable, list[int]](list)
    for seat in seats(plan):
        for key in _sync_keys(plan, seat):
            found[key].append(seat.rank)
    return [tuple(ranks) for ranks in found.values() if len(ranks) > 1]


def _sync_keys(plan: Plan, seat: Seat) -> Iterator[Hashable]:
    grid, place = plan.module(seat.module), (seat.module, seat.stage)
    yield "tensor", *place, seat.replica
    yield "context", *place, seat.dp_rank, seat.tp_rank
    shared = max(grid.parameter_shards, grid.parallel.ep)
    yield "shards", *place, seat.tp_rank, seat.replica // shared


def stuck(
    plan: Plan, calls: Calls, communicators: Communicators = "pairs", *, num_queues: Literal[1] | None = 1
) -> list[str]:
    """What waits for itself on some rank; empty: the step ends.

    Args:
        plan: The layout.
        calls: Whose ends of messages match.
        communicators: Which operations run one after the other.
        num_queues: Of a device; None: one per stream.
    """
    graph = _Graph()
    other_end = dict[tuple[int, int], tuple[int, int]]()
    for (_, source, target), (sent, received) in _ends(calls).items():
        for one, other in zip(sent, received, strict=True):
            other_end[source, one], other_end[target, other] = (target, other), (source, one)
    for rank, of_rank in calls.items():
        computed: Hashable | None = None
        last_of = dict[Hashable, Hashable]()
        for number, call in enumerate(of_rank):
            begin, end = ("begin", rank, number), ("end", rank, number)
            graph.after(end, begin)
            if number and num_queues:
                graph.after(begin, ("begin", rank, number - 1))
            if computed is not None:
                graph.after(begin, computed)
            if call.kind in ("send", "receive"):
                own = (call.group, call.peer) if communicators == "pairs" else call.group
                if own in last_of:
                    graph.after(begin, last_of[own])
                last_of[own] = end
                graph.after(end, ("begin", *other_end[rank, number]))
            else:
                if call.kind == "wait":
                    graph.after(end, ("end", rank, call.message))
                computed = end
    for members in sync_groups(plan):
        of_members = [[n for n, c in enumerate(calls[rank]) if c.kind == "compute"] for rank in members]
        for numbers in zip(*of_members, strict=True):
            together = ("together", members[0], members, numbers[0])
            for rank, number in zip(members, numbers, strict=True):
                graph.after(together, ("begin", rank, number))
                graph.after(("end", rank, number), together)
    return [_text(calls, node) for node in graph.cycle()]


def _ends(calls: Calls) -> dict[tuple[str, int, int], tuple[list[int], list[int]]]:
    """By (group, source, target), numbers of the source's sends and of the target's receives."""
    found: dict[tuple[str, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for rank, of_rank in calls.items():
        for number, call in enumerate(of_rank):
            if call.kind == "send":
                found[call.group, rank, call.peer][0].append(number)
            elif call.kind == "receive":
                found[call.group, call.peer, rank][1].append(number)
    return found


class _Graph:
    """What must have happened before what."""

    def __init__(self) -> None:
        self._before = defaultdict[Hashable, set[Hashable]](set)

    def after(self, later: Hashable, earlier: Hashable) -> None:
        self._before[later].add(earlier)

    def cycle(self) -> list[Hashable]:
        """Nodes each of which waits for the next, the last for the first; empty: there is none."""
        num_left = {node: len(before) for node, before in self._before.items()}
        following = defaultdict[Hashable, list[Hashable]](list)
        for node, before in self._before.items():
            for earlier in before:
                following[earlier].append(node)
        ready = deque(node for node in following if node not in num_left)
        while ready:
            for node in following[ready.popleft()]:
                num_left[node] -= 1
                if not num_left[node]:
                    ready.append(node)
        left = {node for node, number in num_left.items() if number}
        if not left:
            return []
        node, seen = next(iter(left)), dict[Hashable, int]()
        while node not in seen:
            seen[node] = len(seen)
            node = next(earlier for earlier in self._before[node] if earlier in left)
        return list(seen)[seen[node] :]


def _text(calls: Calls, node: Hashable) -> str:
    what, rank, *rest = node  # type: ignore[misc]  # made above
    return f"{what} rank {rank} {calls[rank][rest[-1]]}"


def communicators(calls: Calls) -> dict[int, set[tuple[str, int]]]:
    """By rank, (process group, peer) of the communicators of pairs that a step's messages need."""
    return {rank: {(c.group, c.peer) for c in of if c.kind in ("send", "receive")} for rank, of in calls.items()}


def most_pending(calls: Calls) -> dict[int, int]:
    """By rank, most messages at once that it has asked for and whose end its compute stream has not waited for.

    Each may be a kernel that holds multiprocessors until the other end is there.
    """
    found = dict[int, int]()
    for rank, of_rank in calls.items():
        pending = most = 0
        for call in of_rank:
            pending += {"send": 1, "receive": 1, "wait": -1, "compute": 0}[call.kind]
            most = max(most, pending)
        found[rank] = most
    return found
