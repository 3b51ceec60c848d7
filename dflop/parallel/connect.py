"""Connections between ranks, opened before training and in an order on which all agree.

NCCL connects two ranks of a group when the first of them sends, and both wait for it. In the middle of a step two ranks
that send to each other, rows in one group and a gradient in the other, would each wait for the other to receive, for
ever. The first message of a pair also takes seconds, which no timing of a step should hold.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dflop.parallel.topology import Groups, peers_of, seats
from dflop.records import LLM, Plan


def pairs(plan: Plan) -> list[tuple[int, int]]:
    """Ranks that exchange activations or gradients in a plan, the lower first, in ascending order."""
    grid_of = {grid.module: grid for grid in plan.pipes}
    llm = grid_of[LLM]
    found: set[tuple[int, int]] = set()
    for seat in seats(plan):
        grid = grid_of[seat.module]
        if seat.stage + 1 < grid.parallel.pp:
            behind = [(grid, seat.stage + 1, seat.dp_rank)]
        else:
            behind = [(llm, 0, dp_rank) for dp_rank in range(llm.parallel.dp) if seat.module != LLM]
        for other, stage, dp_rank in behind:
            peers = peers_of(seat, grid.parallel.tp, other, stage, dp_rank)
            ranks = (peers.takes_from, *peers.gives_to)
            found |= {(min(seat.rank, rank), max(seat.rank, rank)) for rank in ranks}
    return sorted(found)


def connect(groups: Groups, plan: Plan, device: torch.device) -> None:
    """Open every connection that training uses; collective over the world.

    Args:
        groups: This rank's.
        plan: The same on every rank.
        device: Where the rank's tensors live.
    """
    token, rank = torch.zeros(1, device=device), dist.get_rank()
    # Every rank goes through its pairs in the order of all pairs, so the first one that is left can always meet.
    for low, high in pairs(plan):
        for group in (groups.forward, groups.backward):
            if rank == low:
                dist.send(token, high, group=group)
            elif rank == high:
                dist.recv(token, low, group=group)
    for shared in (groups.replicas, groups.shards, groups.copies, groups.tensor, groups.tied):
        if shared is not None:
            dist.all_reduce(token, group=shared)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
