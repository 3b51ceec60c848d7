"""Who sits where: global rank <-> (module, stage, dp rank, cp rank, tp rank), and the process groups training needs.

Every module of a split `Plan` has its own block of ranks, a colocated plan has one; inside a block
rank = first_rank + ((stage * dp + dp_rank) * cp + cp_rank) * tp + tp_rank. The first half of this file is plain
arithmetic and is shared with tests, reports and emitted plans; `make_groups` and `connect` talk to torch.distributed,
and every rank must call them with one plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dflop.records import LLM, ModulePlan, Plan

if TYPE_CHECKING:  # seconds, for who only asks who sits where
    import torch
    import torch.distributed as dist

CHECKPOINT_TIMEOUT = timedelta(hours=1)
"""Writing is not training: what is slow here holds up nobody."""
MAX_MESSAGE_CTAS = 4
"""Thread blocks, so channels, of a message between stages over NCCL, which by itself takes up to 32 over NVLink. Each
holds a multiprocessor from when a receive is posted until its message is there, and each channel that receives has some
10 MiB of buffers per pair of ranks, 4 MiB of them for `NCCL_PROTO_SIMPLE` (NCCL 2.28: `transport/p2p.cc`,
`ncclTopoGetNchannels` in `graph/paths.cc`; read, not measured)."""


@dataclass(frozen=True, slots=True)
class SeatPart:
    """Layers of one module that a rank runs."""

    module: str
    layers: tuple[int, int]
    """Global indices, `[first, end)`; never empty."""
    is_first: bool
    """Takes the module's input: media, or token ids."""
    is_last: bool
    """Runs the module's edge: projector, or head and loss."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of one rank in a plan."""

    rank: int
    module: str
    """Whose grid it is; of a colocated plan, whose stages hold layers of several modules, the LLM's."""
    stage: int
    dp_rank: int
    tp_rank: int
    parts: tuple[SeatPart, ...]
    """What it runs, in the order of the plan's modules."""
    cp_rank: int
    replica: int
    """Index among the ranks that hold the same weights."""

    def part(self, module: str) -> SeatPart | None:
        """The seat's layers of a module, if it has any."""
        return next((p for p in self.parts if p.module == module), None)


@dataclass(frozen=True, slots=True)
class Peers:
    """Ranks that one rank exchanges a tensor with when grids may have different tensor parallelism.

    Ranks of a tensor-parallel group hold equal activations, so each takes from one of the other group and gives to
    those that take from it. The way back is the same with the roles swapped.
    """

    takes_from: int
    gives_to: tuple[int, ...]


def rank_of(module: ModulePlan, stage: int, replica: int, tp_rank: int = 0) -> int:
    """Global rank of a seat; replica is `dp_rank * cp + cp_rank`."""
    p = module.parallel
    return module.first_rank + (stage * p.num_replicas + replica) * p.tp + tp_rank


def peers_of(seat: Seat, tp: int, other: ModulePlan, stage: int, replica: int) -> Peers:
    """Who, among the tensor-parallel ranks of another stage, exchanges tensors with this seat.

    Args:
        seat: This rank.
        tp: Degree of its own grid.
        other: Grid of the other stage.
        stage: The other stage.
        replica: Which of its replicas.
    """
    others = [rank_of(other, stage, replica, t) for t in range(other.parallel.tp)]
    return Peers(others[seat.tp_rank % len(others)], tuple(others[seat.tp_rank :: tp]))


def seats(plan: Plan) -> Iterator[Seat]:
    """Every seat of the plan in rank order."""
    for grid in sorted(plan.pipes, key=lambda grid: grid.first_rank):
        p = grid.parallel
        for stage in range(p.pp):
            parts = tuple(_parts(plan.grid_of(grid.module), stage))
            for replica in range(p.num_replicas):
                dp_rank, cp_rank = divmod(replica, p.cp)
                for tp_rank in range(p.tp):
                    rank = rank_of(grid, stage, replica, tp_rank)
                    yield Seat(rank, grid.module, stage, dp_rank, tp_rank, parts, cp_rank, replica)


def _parts(modules: Sequence[ModulePlan], stage: int) -> Iterator[SeatPart]:
    for module in modules:
        layers = module.layers_per_stage
        first, end = sum(layers[:stage]), sum(layers[: stage + 1])
        if first < end:
            yield SeatPart(module.module, (first, end), first == 0, end == sum(layers))


def seat_of(plan: Plan, rank: int) -> Seat:
    """Seat of `rank`.

    Raises:
        ValueError: the plan does not use that rank.
    """
    for seat in seats(plan):
        if seat.rank == rank:
            return seat
    raise ValueError(f"rank {rank} is not part of a plan of {plan.num_processes} processes")


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
    checkpoint: dist.ProcessGroup
    """World group for small CPU tensors of the thread that writes checkpoints."""
    replicas: dist.ProcessGroup
    """Replicas of this rank's stage: its ranks of one tp rank."""
    tensor: dist.ProcessGroup
    """Tensor-parallel ranks of this rank's stage and replica, in the order of their parts."""
    shards: dist.ProcessGroup | None = None
    """FSDP2 group of this rank, within `replicas`; None: parameters are not sharded."""
    copies: dist.ProcessGroup | None = None
    """Ranks of `replicas` with the same shard (HSDP); None: this rank is the only one."""
    experts: dist.ProcessGroup | None = None
    """Expert-parallel group, within `replicas`, in the order of the experts; None: ep is 1."""
    same_experts: dist.ProcessGroup | None = None
    """Ranks with the experts of this one, within `shards`, or `replicas` where these are whole; None: ep is 1."""
    context: dist.ProcessGroup | None = None
    """Context-parallel ranks of this rank's stage, dp rank and tp rank; None: it has its samples for itself."""
    tied: dist.ProcessGroup | None = None
    """First and last LLM stage, where a tied embedding lives on both: all replicas of one tp rank, or under FSDP2 the
    two ranks of the same rows; None elsewhere."""

    @property
    def runs_alike(self) -> bool:
        """Whether this rank must run what others run: layers gather parameters, or send tokens to experts."""
        return self.shards is not None or self.experts is not None


def make_groups(plan: Plan, rank: int, *, timeout_s: float, is_tied: bool = False) -> Groups:
    """Create the process groups of a plan; collective over the world.

    Args:
        plan: The same on every rank.
        rank: This rank.
        timeout_s: A collective that takes longer raises on every rank.
        is_tied: Whether the LLM's head is its embedding.

    Raises:
        ValueError: the plan has no seat for this rank.
    """
    import torch.distributed as dist

    world, timeout, options = list(range(dist.get_world_size())), timedelta(seconds=timeout_s), None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = MAX_MESSAGE_CTAS
    # All ranks must create all groups in the same order, their own or not.
    directions = ("forward", "backward")
    groups: dict[str, Any] = {d: dist.new_group(world, timeout=timeout, pg_options=options) for d in directions}
    groups |= {name: dist.new_group(world, timeout=timeout, backend="gloo") for name in ("control", "feed")}
    # Its ranks wait for the slowest disk.
    groups["checkpoint"] = dist.new_group(world, timeout=max(timeout, CHECKPOINT_TIMEOUT), backend="gloo")
    for name, ranks in _sharing(plan, is_tied=is_tied):
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            groups[name] = group
    grid = plan.module(seat_of(plan, rank).module)
    if grid.parameter_shards == grid.parallel.num_replicas > 1:
        groups["shards"] = groups["replicas"]
    return Groups(**groups)


def _sharing(plan: Plan, *, is_tied: bool) -> Iterator[tuple[str, Sequence[int]]]:
    """(field of `Groups`, ranks) of every group that is not the whole world."""
    for grid in plan.pipes:
        p, num_shards = grid.parallel, grid.parameter_shards
        for stage, tp_rank in itertools.product(range(p.pp), range(p.tp)):
            replicas = [rank_of(grid, stage, replica, tp_rank) for replica in range(p.num_replicas)]
            shards = _neighbours(replicas, num_shards)
            yield "replicas", replicas
            if 1 < num_shards < len(replicas):
                yield from (("shards", ranks) for ranks in shards)
                yield from (("copies", ranks) for ranks in zip(*shards, strict=True))
            if p.ep > 1:
                yield from (("experts", ranks) for ranks in _neighbours(replicas, p.ep))
                alike = shards if num_shards > 1 else [replicas]
                yield from (("same_experts", ranks[k :: p.ep]) for ranks in alike for k in range(p.ep))
            if p.cp > 1:
                yield from (("context", ranks) for ranks in _neighbours(replicas, p.cp))
        for stage, replica in itertools.product(range(p.pp), range(p.num_replicas)):
            yield "tensor", [rank_of(grid, stage, replica, tp_rank) for tp_rank in range(p.tp)]
    llm = plan.module(LLM)
    held, parallel = [stage for stage, n in enumerate(llm.layers_per_stage) if n], llm.parallel
    for tp_rank in range(parallel.tp if is_tied and len(held) > 1 else 0):
        ends = [
            [rank_of(llm, stage, r, tp_rank) for r in range(parallel.num_replicas)] for stage in (held[0], held[-1])
        ]
        each = 1 if llm.parameter_shards > 1 else parallel.num_replicas
        yield from (("tied", [*a, *b]) for a, b in zip(*(_neighbours(ranks, each) for ranks in ends), strict=True))


def _neighbours(ranks: Sequence[int], num: int) -> list[Sequence[int]]:
    """Groups of `num` neighbours."""
    return [ranks[k : k + num] for k in range(0, len(ranks), num)]


def pairs(plan: Plan) -> list[tuple[int, int]]:
    """Ranks that exchange activations or gradients in a plan, the lower first, in ascending order."""
    grid_of = {grid.module: grid for grid in plan.pipes}
    llm = grid_of[LLM]
    found: set[tuple[int, int]] = set()
    for seat in seats(plan):
        grid = grid_of[seat.module]
        if seat.stage + 1 < grid.parallel.pp:
            behind = [(grid, seat.stage + 1, seat.replica)]
        else:
            behind = [(llm, 0, replica) for replica in range(llm.parallel.num_replicas) if seat.module != LLM]
        for other, stage, replica in behind:
            peers = peers_of(seat, grid.parallel.tp, other, stage, replica)
            ranks = (peers.takes_from, *peers.gives_to)
            found |= {(min(seat.rank, rank), max(seat.rank, rank)) for rank in ranks}
    return sorted(found)


def connect(groups: Groups, plan: Plan, device: torch.device) -> None:
    """Open every connection that training uses, in an order on which all agree; collective over the world.

    NCCL connects two ranks of a group when the first of them sends, and both wait for it. In the middle of a step two
    ranks that send to each other, rows in one group and a gradient in the other, would each wait for the other to
    receive, for ever. The first message of a pair also takes seconds, which no timing of a step should hold. A group of
    one sends nothing; asked to, NCCL would open a communicator for it, with buffers (NVIDIA/nccl issue 2363).

    Args:
        groups: This rank's.
        plan: The same on every rank.
        device: Where the rank's tensors live.
    """
    import torch
    import torch.distributed as dist

    from dflop.parallel.exchange import message_device

    token, rank = torch.zeros(1, device=message_device(device, groups.forward)), dist.get_rank()
    # Every rank goes through its pairs in the order of all pairs, so the first one that is left can always meet.
    for low, high in pairs(plan):
        for group in (groups.forward, groups.backward):
            if rank == low:
                dist.send(token, high, group=group)
            elif rank == high:
                dist.recv(token, low, group=group)
    sharing = (groups.replicas, groups.shards, groups.copies, groups.tensor, groups.context, groups.tied)
    for shared in (*sharing, groups.experts, groups.same_experts):
        if shared is not None and shared.size() > 1:
            dist.all_reduce(token, group=shared)
    if token.is_cuda:
        torch.cuda.synchronize(device)
