"""Turn each rank's partial gradients into the gradient of the global batch, and its norm.

The loss is already divided by the global token count, so replicas SUM (never average) in one flat all-reduce per
step; a parameter that saw no sample contributes zeros. A tied embedding lives on the first and on the last LLM stage:
its copies are summed over both, which keeps them equal for ever. Clipping uses one norm over all stages, each
parameter counted once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from dflop.models.build import LlmStage, Stage
from dflop.parallel.topology import Groups, Seat
from dflop.records import Plan


class GradientReducer:
    """Reduces the gradients of one seat.

    Args:
        plan: The layout.
        seat: This rank's place.
        stages: Its parameters.
        groups: Process groups.
        sharded: Names of the parameters of which tensor-parallel ranks hold a part each.
    """

    def __init__(
        self, plan: Plan, seat: Seat, stages: Sequence[Stage], groups: Groups, sharded: Collection[str] = ()
    ) -> None:
        self._groups = groups
        names = {n: p for stage in stages for n, p in stage.names.items() if p.requires_grad}
        llm = next((s for s in stages if isinstance(s, LlmStage)), None)
        # On one stage it is one parameter, which gets both gradients by itself.
        tied_name = llm.tied if llm is not None and not (llm.is_first and llm.is_last) else ""
        self._tied = [p for n, p in names.items() if n == tied_name]
        self._own = [p for n, p in names.items() if n != tied_name]
        self._num_replicas = plan.module(seat.module).parallel.dp
        skipped = tied_name if llm is not None and not llm.is_first else ""
        self._counted = [
            p for n, p in names.items() if n != skipped and seat.dp_rank == 0 and (seat.tp_rank == 0 or n in sharded)
        ]

    def reduce(self) -> None:
        """Sum gradients over the replicas that hold the same parameters; missing ones become zeros."""
        for p in (*self._own, *self._tied):
            # The same with one replica as with many, so that weight decay treats an unused parameter alike.
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self._num_replicas > 1:
            _sum_flat(self._own, self._groups.replicas)
        if self._tied and self._groups.tied is not None:
            _sum_flat(self._tied, self._groups.tied)

    def norm_and_loss(self, loss: float) -> tuple[float, float]:
        """(gradient norm over the whole model, global mean loss) from every rank's share of the loss."""
        squares = sum(float(p.grad.float().pow(2).sum()) for p in self._counted if p.grad is not None)
        totals = torch.tensor([squares, loss], dtype=torch.float64)
        dist.all_reduce(totals, group=self._groups.control)
        return float(totals[0]) ** 0.5, float(totals[1])

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale gradients so that the model's norm is at most `max_norm`."""
        scale = max_norm / (norm + 1e-6)
        if scale < 1:
            for p in (*self._own, *self._tied):
                if p.grad is not None:
                    p.grad.mul_(scale)


def _sum_flat(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
