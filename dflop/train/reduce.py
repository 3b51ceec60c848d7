"""Turn each rank's partial gradients into the gradient of the global batch, and its norm.

The loss is already divided by the global token count, so replicas SUM (never average), and while the step's last
backward pass runs (`buckets.py`); a parameter that saw no sample contributes zeros. Gradients accumulate and are summed
in float32, whatever the weights' type. A tied embedding lives on the first and on the last LLM stage: its copies are
summed over both, which keeps them equal for ever. Clipping uses one norm over all stages, each parameter counted once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dflop.models.build import Stage
from dflop.models.generic.llm_stage import LlmStage
from dflop.parallel.topology import Groups, Seat
from dflop.records import Plan
from dflop.train.buckets import GradientBuckets, Owners, Rows, owned_rows
from dflop.train.fsdp import set_last_pass, take_gradients
from dflop.train.zero import those_apart


class Totals(NamedTuple):
    """What all ranks learn of a step."""

    norm: float
    """Norm of the gradient of the whole model."""
    loss: float
    """Global mean."""
    flags: tuple[bool, ...]
    """Which of them any rank has raised."""
    norm_of: dict[str, float]
    """Norm of the gradient of every module."""
    more: tuple[float, ...]
    """Sums of what else was given."""


class GradientReducer:
    """Reduces the gradients of one seat.

    Args:
        plan: The layout.
        seat: This rank's place.
        stages: Its parameters; from now on their gradients are float32.
        groups: Process groups.
        sharded: Names of the parameters of which tensor-parallel ranks hold a part each.
        owners: Replica that alone needs a parameter's gradient, as the optimizer says; where none is named, all do.
    """

    def __init__(
        self, plan: Plan, seat: Seat, stages: Sequence[Stage], groups: Groups, sharded: Collection[str] = (),
        *, owners: Owners | None = None,
    ) -> None:  # fmt: skip
        self._seat, self._stages, self._groups = seat, stages, groups
        self._owners = owners or {}
        names = {n: p for stage in stages for n, p in stage.names.items() if p.requires_grad}
        for p in names.values():
            p.grad_dtype = torch.float32
        llm = next((s for s in stages if isinstance(s, LlmStage)), None)
        # On one stage it is one parameter, which gets both gradients by itself.
        tied_name = llm.tied if llm is not None and not (llm.is_first and llm.is_last) else ""
        self._tied = {n: p for n, p in names.items() if n == tied_name}
        others = {n: p for n, p in names.items() if n != tied_name}
        partial = {name for stage in stages for name in stage.partial}
        are_rows = groups.shards is not None
        apart = those_apart(stages, groups)
        self._buckets = GradientBuckets(
            {} if are_rows else others, self._owners, groups.replicas, late=partial, apart=apart
        )
        self._summed = list(others.values()) if are_rows else []
        self._partial = [p for n, p in names.items() if n in partial and are_rows]
        num_shards, ep = plan.module(seat.module).parameter_shards, plan.module(seat.module).parallel.ep
        skipped = tied_name if llm is not None and not llm.is_first else ""
        self._modules = tuple(m.module for m in plan.modules)
        module_of = {n: part.module for part, stage in zip(seat.parts, stages, strict=True) for n in stage.names}

        def counted(n: str, p: nn.Parameter) -> Rows | None:
            if are_rows:
                return () if seat.replica < num_shards else None
            return owned_rows(p, self._owners.get(n, (0,)), seat.replica // (ep if n in apart else 1))

        self._counted = [
            (self._modules.index(module_of[n]), p, rows)
            for n, p in names.items()
            if n != skipped and (seat.tp_rank == 0 or n in sharded) and (rows := counted(n, p)) is not None
        ]

    def expect_last_backward(self) -> None:
        """The next backward pass is the last of the step: begin to sum what it finishes."""
        self._buckets.expect_last()
        set_last_pass(self._stages, is_last=True)

    def reduce(self) -> None:
        """Sum gradients over the replicas that hold the same parameters; missing ones become zeros."""
        take_gradients(self._stages)
        for p in self._unbucketed():
            # The same with one replica as with many, so that weight decay treats an unused parameter alike.
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=torch.float32)
        _sum([*self._buckets.late, *_gradients(self._partial)], self._groups.tensor)
        if self._groups.copies is not None:
            _sum(_gradients(self._unbucketed()), self._groups.copies)
        self._buckets.finish()
        for name, p in self._tied.items():
            self._sum_tied(name, p)

    def _sum_tied(self, name: str, p: nn.Parameter) -> None:
        assert self._groups.tied is not None
        assert p.grad is not None
        # Every rank of the group gets the sum, so that the owners on either stage make the same update.
        dist.all_reduce(p.grad, group=self._groups.tied)
        if self._seat.replica not in self._owners.get(name, (self._seat.replica,)):
            p.grad = None

    def totals(self, loss: float, flags: Sequence[bool] = (), more: Sequence[float] = ()) -> Totals:
        """What all ranks learn of a step in one all-reduce.

        Args:
            loss: This rank's share of the loss.
            flags: What this rank raises; as many on every rank.
            more: To be summed, too; as many on every rank.
        """
        totals = torch.tensor([*self._squares(), loss, *flags, *more], dtype=torch.float64)
        dist.all_reduce(totals, group=self._groups.control)
        squares, (mean, *raised), sums = totals.split([len(self._modules), 1 + len(flags), len(more)])
        norms = dict(zip(self._modules, squares.sqrt().tolist(), strict=True))
        return Totals(float(squares.sum()) ** 0.5, float(mean), tuple(map(bool, raised)), norms, (*sums.tolist(),))

    def _squares(self) -> list[float]:
        """Per module the sum of this rank's squared gradients; read from the device once."""
        norms: list[list[torch.Tensor]] = [[] for _ in self._modules]
        for i, p, own in self._counted:
            if p.grad is not None:
                # Of rows, in one kernel that copies nothing: whole tensors, torch sums up less exactly on CPUs.
                norms[i].append(
                    torch.linalg.vector_norm(p.grad[own] if own else p.grad, dim=-1, dtype=torch.float32).flatten()
                )
        sums = {i: torch.cat(of).double().square().sum() for i, of in enumerate(norms) if of}
        read = dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}
        return [read.get(i, 0.0) for i in range(len(norms))]

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale gradients so that the model's norm is at most `max_norm`."""
        scale = max_norm / (norm + 1e-6)
        gradients = [*self._buckets.flats, *_gradients(self._unbucketed())]
        if scale < 1 and gradients:
            torch._foreach_mul_(gradients, scale)

    def zero(self) -> None:
        """Forget all gradients."""
        self._buckets.zero()
        for p in self._unbucketed():
            p.grad = None

    def _unbucketed(self) -> list[nn.Parameter]:
        return [*self._tied.values(), *self._summed]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _sum(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()
