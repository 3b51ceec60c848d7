"""What a message or a collective between processes costs, by size, ranks and nodes; and copies to and from the host.

Every operation is timed in groups of the first 2, 4, 8, ... ranks and all of them, so that a group within a node and
one over several are both seen; messages go from the first rank to its neighbour and to the first rank of another node.
Devices of the first rank's node copy to and from the host at once, as they share what leads there.
All ranks run the same sequence; the first one times it behind a barrier, decides when the budget is spent, and has the
rows.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dflop.cost.link_costs import ALL_GATHER, ALL_REDUCE, HOST_COPY, P2P
from dflop.models.offload import both_ways
from dflop.parallel.exchange import message_device
from dflop.profile.timing import half_iqr, of_first_rank
from dflop.records import LinkMeasurement

SIZES_BYTES = tuple(1 << k for k in range(10, 27, 2))
"""1 KiB to 64 MiB."""
MIN_SIZES = 3
"""Sizes every operation is timed at, whatever the budget: a latency and a rate cannot be told from fewer."""
MIN_REPEATS, MAX_REPEATS = 5, 30


@dataclass(frozen=True, slots=True)
class _Members:
    """Ranks that do something together."""

    ranks: tuple[int, ...]
    num_nodes: int
    group: Any
    """Process group; a placeholder on ranks that are not in it."""


def profile_links(
    *, profile_key: str, hardware: str, software: str, device: torch.device, budget_s: float,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> Iterator[LinkMeasurement]:  # fmt: skip
    """Time links between the processes of the default group; all of them must exhaust the result.

    Args:
        profile_key: Identity of the profile.
        hardware: Label of the device in every row.
        software: Versions.
        device: Of this process; messages over gloo lie in host memory, whatever it is. A GPU has copies timed, too.
        budget_s: Time for everything together, spread evenly over operations and groups; small sizes come first.
        sizes_bytes: Ascending. Of copies the last `MIN_SIZES` are timed: what layers keep is large.

    Yields:
        Rows on rank 0, nothing elsewhere.
    """
    cases = _cases(device.type == "cuda")
    share_s = budget_s / max(len(cases), 1)
    for op, members in cases:
        if dist.get_rank() not in members.ranks:
            continue
        leads = dist.get_rank() == members.ranks[0]
        started = time.perf_counter()
        at = device if op == HOST_COPY else message_device(device)
        for done, num_bytes in enumerate(sizes_bytes[-MIN_SIZES:] if op == HOST_COPY else sizes_bytes):
            left_s = share_s - (time.perf_counter() - started)
            if not of_first_rank(done < MIN_SIZES or left_s > 0, members.group):
                break
            exchange = _operation(op, members, num_bytes, at)
            seconds = _time(exchange, members, at, left_s / len(sizes_bytes))
            if op == P2P:
                seconds = [s / 2 for s in seconds]
            if leads:
                yield LinkMeasurement(
                    profile_key=profile_key, hardware=hardware, software=software, op=op,
                    num_ranks=len(members.ranks), num_nodes=members.num_nodes, num_bytes=num_bytes,
                    seconds=statistics.median(seconds), spread_s=half_iqr(seconds), num_repeats=len(seconds),
                )  # fmt: skip
    dist.barrier()


def _cases(has_host: bool) -> list[tuple[str, _Members]]:
    """Operations and who takes part, the same list on every rank; makes a process group for each set of ranks."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if len(hosts) < 2:
        return []
    prefixes = sorted({min(1 << k, len(hosts)) for k in range(1, len(hosts).bit_length() + 1)})
    together = [tuple(range(n)) for n in prefixes]
    strangers = [r for r, host in enumerate(hosts) if host != hosts[0]]
    pairs = list(dict.fromkeys([(0, 1), *((0, r) for r in strangers[:1])]))
    local = [tuple(r for r, host in enumerate(hosts) if host == hosts[0])] * has_host
    members = {
        ranks: _Members(ranks, len({hosts[r] for r in ranks}), dist.new_group(list(ranks)))
        for ranks in dict.fromkeys([*together, *pairs, *local])
    }
    collectives = [(op, members[ranks]) for op in (ALL_REDUCE, ALL_GATHER) for ranks in together]
    return [(P2P, members[r]) for r in pairs] + collectives + [(HOST_COPY, members[r]) for r in local]


def _operation(op: str, members: _Members, num_bytes: int, device: torch.device) -> Callable[[], None]:
    """One exchange of `num_bytes`; a message goes to the other end and back."""
    group, ranks = members.group, members.ranks
    if op == ALL_REDUCE:
        values = torch.zeros(max(num_bytes // 4, 1), device=device)
        return lambda: _wait(dist.all_reduce(values, group=group, async_op=True))
    if op == ALL_GATHER:
        part = torch.zeros(max(num_bytes // (len(ranks) - 1), 1), dtype=torch.uint8, device=device)
        parts = [torch.empty_like(part) for _ in ranks]
        return lambda: _wait(dist.all_gather(parts, part, group=group, async_op=True))
    if op == HOST_COPY:
        return both_ways(num_bytes, device)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    first, second = ranks
    if dist.get_rank() == first:

        def there_and_back() -> None:
            dist.send(message, second, group=group)
            dist.recv(message, second, group=group)
    else:

        def there_and_back() -> None:
            dist.recv(message, first, group=group)
            dist.send(message, first, group=group)

    return there_and_back


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _time(operation: Callable[[], None], members: _Members, device: torch.device, share_s: float) -> list[float]:
    """Seconds of repeated operations: as many as fit into `share_s`, within the bounds."""
    _once(operation, members, device)  # connections are made by the first
    first_s = _once(operation, members, device)
    num_repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(share_s / max(first_s, 1e-9))))
    return [_once(operation, members, device) for _ in range(of_first_rank(num_repeats, members.group))]


def _once(operation: Callable[[], None], members: _Members, device: torch.device) -> float:
    dist.barrier(group=members.group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
