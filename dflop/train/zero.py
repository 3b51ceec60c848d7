"""ZeRO-1 (arXiv 1910.02054): data-parallel replicas share out the optimizer's states, each owning whole parameters.

Whole, because then a state has its parameter's shape and global name, and a checkpoint knows nothing of who owned what.
Gradients are summed to the owner alone, and what it makes of the weights goes back to the others: as many bytes on the
way as one all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn

from dflop.models.build import Stage
from dflop.parallel.topology import Seat
from dflop.records import Plan
from dflop.train.flat import run_flat

Owners = Mapping[str, int]
"""Data-parallel rank that updates a parameter; a name that is missing is updated by all replicas alike."""


def owners_of(plan: Plan, seat: Seat, stages: Sequence[Stage]) -> dict[str, int]:
    """Owners of a seat's trained parameters, equal on all replicas of its stage; none of what they hold rows of.

    The largest parameter goes first and always to whoever has least, so no replica has more than the mean and one
    parameter.

    Args:
        plan: Says which modules share out their optimizer.
        seat: Any of the replicas.
        stages: Its parts.
    """
    dp = plan.module(seat.module).parallel.dp
    sizes = {
        name: p.numel()
        for part, stage in zip(seat.parts, stages, strict=True)
        if plan.module(part.module).shard_optimizer and dp > 1 and not stage.shards
        for name, p in stage.names.items()
        if p.requires_grad
    }
    owners, loads = {}, [0] * dp
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def broadcast_from_owners(parameters: Mapping[str, nn.Parameter], owners: Owners, replicas: dist.ProcessGroup) -> None:
    """Give every replica the weights of the parameters' owners."""
    for owner in range(replicas.size()):
        weights = [p.detach() for name, p in parameters.items() if owners[name] == owner]
        run_flat(weights, partial(dist.broadcast, group=replicas, group_src=owner))
