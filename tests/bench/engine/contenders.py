"""Two ways of training the same global batches: the engine under a plan, and what people write with Hugging Face alone.

Both take the same arrays, which are made beforehand, divide the loss by the supervised tokens of the global batch, sum
gradients over the processes, clip them to one norm and update with the same optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from dflop.models.build import IGNORE_LABEL
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import Plan, StepPlan
from dflop.train.engine import Engine, StepTrace
from dflop.train.feed import Feed
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.reduce import GradientReducer
from dflop.train.stages import llm_stage_of, make_stages
from tests.bench.engine.samples import Workload

LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, BETAS = 1e-5, 1.0, 0.01, (0.9, 0.95)
TIMEOUT_S = 300.0
CPU = torch.device("cpu")


class Contender(Protocol):
    """One process of a way of training."""

    def step(self, index: int) -> float:
        """Trains global batch `index`; returns this process's share of the loss."""


class EngineRank:
    """One process of the engine, its inputs prepared."""

    def __init__(self, workload: Workload, plan: Plan, step_plans: Sequence[StepPlan]) -> None:
        rank, family = dist.get_rank(), workload.family
        seat, self.groups = seat_of(plan, rank), make_groups(plan, rank, timeout_s=TIMEOUT_S)
        self.stages, self.sharded = make_stages(workload.model(), family, seat, self.groups.tensor)
        feed = Feed(workload.source, family, plan, seat, llm_stage_of(self.stages))
        self._inputs = [feed.prepare(p).microbatches for p in step_plans]
        self._num_tokens = [p.num_supervised_tokens for p in step_plans]
        self._healthy = [torch.ones(len(p.sample_index), dtype=torch.bool) for p in step_plans]
        width = workload.hidden_size
        self._engine = Engine(plan, seat, self.stages, self.groups, CPU, hidden_size=width, row_width=width)
        self._reducer = GradientReducer(plan, seat, self.stages, self.groups, self.sharded)
        settings = OptimizerSettings(LEARNING_RATE, WEIGHT_DECAY, betas=BETAS)
        self.optimizer = make_optimizer(plan, seat, self.stages, self.groups, self.sharded, settings)

    def run(self, index: int) -> StepTrace:
        """Forward and backward of all microbatches."""
        return self._engine.run(
            self._inputs[index], healthy=self._healthy[index], num_loss_tokens=self._num_tokens[index]
        )

    def step(self, index: int) -> float:
        trace = self.run(index)
        self._reducer.reduce()
        norm, _ = self._reducer.norm_and_loss(trace.loss)
        self._reducer.clip(norm, MAX_GRAD_NORM)
        self.optimizer.step(LEARNING_RATE)
        self.optimizer.zero_grad()
        return trace.loss


class PlainReplica:
    """One data-parallel process with the whole model as Hugging Face has it.

    Samples are dealt out in turn, as a distributed sampler does, and trained a few at a time, padded to the longest.

    Args:
        workload: What to train.
        num_side_by_side: Samples of a microbatch.
    """

    def __init__(self, workload: Workload, num_side_by_side: int) -> None:
        self._model = workload.plain_model()
        self._model.train()
        rank, num_ranks, n = dist.get_rank(), dist.get_world_size(), num_side_by_side
        self._inputs = []
        for batch in workload.batches:
            own = batch[rank::num_ranks]
            self._inputs.append([workload.padded(own[i : i + n]) for i in range(0, len(own), n)])
        self._num_tokens = [sum(s.num_supervised_tokens for s in batch) for batch in workload.batches]
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY
        )  # fmt: skip

    def step(self, index: int) -> float:
        loss = 0.0
        for inputs, labels in self._inputs[index]:
            logits = self._model(**inputs).logits
            share = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
            )
            share = share / self._num_tokens[index]
            share.backward()
            loss += float(share.detach())
        self._reduce()
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def _reduce(self) -> None:
        """One flat sum: on a CPU that computes on all its cores there is nothing to hide buckets behind."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        for p, part in zip(self._parameters, flat.split([g.numel() for g in gradients]), strict=True):
            p.grad = part.view_as(p)
