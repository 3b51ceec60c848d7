"""Who sits where: global rank <-> (module, stage, dp rank), and the process groups training needs.

Every module of a `Plan` has its own block of ranks; inside a block rank = first_rank + (stage * dp + dp_rank) * tp +
tp_rank. The first half of this file is plain arithmetic and is shared with tests and reports; `make_groups` is the
only part that talks to torch.distributed, and every rank must call it with the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from dflop.records import LLM, ModulePlan, Plan


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of one rank in a plan."""

    rank: int
    module: str
    stage: int
    dp_rank: int
    tp_rank: int
    layers: tuple[int, int]
    """Global indices of the stage's layers, `[first, end)`."""


def rank_of(module: ModulePlan, stage: int, dp_rank: int, tp_rank: int = 0) -> int:
    """Global rank of a seat."""
    p = module.parallel
    return module.first_rank + (stage * p.dp + dp_rank) * p.tp + tp_rank


def seats(plan: Plan) -> Iterator[Seat]:
    """Every seat of the plan in rank order."""
    for module in plan.modules:
        p = module.parallel
        for stage in range(p.pp):
            first = sum(module.layers_per_stage[:stage])
            layers = (first, first + module.layers_per_stage[stage])
            for dp_rank in range(p.dp):
                for tp_rank in range(p.tp):
                    rank = rank_of(module, stage, dp_rank, tp_rank)
                    yield Seat(rank, module.module, stage, dp_rank, tp_rank, layers)


def seat_of(plan: Plan, rank: int) -> Seat:
    """Seat of `rank`.

    Raises:
        ValueError: the plan does not use that rank.
    """
    for seat in seats(plan):
        if seat.rank == rank:
            return seat
    raise ValueError(f"rank {rank} has no seat in a plan of {plan.num_processes} processes")


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of one rank."""

    forward: dist.ProcessGroup
    """World group for activations; one group per direction keeps tags of the two apart."""
    backward: dist.ProcessGroup
    control: dist.ProcessGroup
    """World group for small CPU tensors (norms, losses)."""
    feed: dist.ProcessGroup
    """The same for the thread that prepares steps ahead, which may be a step ahead of the one that computes."""
    replicas: dist.ProcessGroup
    """Data-parallel replicas of this rank's stage."""
    tied: dist.ProcessGroup
    """First and last LLM stage, all replicas: where a tied embedding lives twice."""


def make_groups(plan: Plan, rank: int, *, timeout_s: float) -> Groups:
    """Create the process groups of a plan; collective over the world.

    Args:
        plan: The same on every rank.
        rank: This rank.
        timeout_s: A collective that takes longer raises on every rank.
    """
    timeout = timedelta(seconds=timeout_s)
    world = list(range(dist.get_world_size()))
    # All ranks must create all groups in the same order, their own or not.
    forward, backward = dist.new_group(world, timeout=timeout), dist.new_group(world, timeout=timeout)
    control = dist.new_group(world, timeout=timeout, backend="gloo")
    feed = dist.new_group(world, timeout=timeout, backend="gloo")
    replicas = None
    for module in plan.modules:
        for stage in range(module.parallel.pp):
            for tp_rank in range(module.parallel.tp):
                ranks = [rank_of(module, stage, d, tp_rank) for d in range(module.parallel.dp)]
                group = dist.new_group(ranks, timeout=timeout)
                replicas = group if rank in ranks else replicas
    llm = plan.module(LLM)
    ends = sorted({rank_of(llm, s, d) for s in (0, llm.parallel.pp - 1) for d in range(llm.parallel.dp)})
    tied = dist.new_group(ends, timeout=timeout)
    if replicas is None:
        raise ValueError(f"rank {rank} has no seat in a plan of {plan.num_processes} processes")
    return Groups(forward, backward, control, feed, replicas, tied)
