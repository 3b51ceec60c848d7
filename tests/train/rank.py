"""A rank of a test: what a job puts together of stages, groups, engine and feed, and nothing around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dflop.models import attention
from dflop.models.family import Family
from dflop.models.weights import Weights
from dflop.parallel.topology import Groups, connect, make_groups, seat_of
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.train import zero
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.inputs import MicrobatchInput, PreparedStep, SampleSource
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.optim import OptimizerSettings
from dflop.train.router_loss import router_loss_of
from dflop.train.stages import apply_plan
from dflop.train.step_trace import StepTrace

TIMEOUT_S = 120
NO_GROUPS = SimpleNamespace(**dict.fromkeys(field.name for field in fields(Groups)), runs_alike=False)
"""Of a rank that is alone."""


def loop_settings(
    run_id: str, num_steps: int, rate: float, *, attempt: int = 0, first_step: int = 0, **train: Any
) -> LoopSettings:
    """Nothing is traced or decoded ahead, unless `train` says so."""
    from dflop.config import TrainConfig  # not on a borrowed GPU

    settings = TrainConfig(**{"prefetch_steps": 1, "trace_every_steps": 0, "warmup_steps": 0} | train)
    return LoopSettings(settings, run_id, attempt, num_steps, rate, first_step)


class Rank:
    """A seat of a plan with its part of a model; one that `is_alone` runs as long as it needs no peer."""

    def __init__(
        self, rank: int, plan: Plan, family: Family, model: torch.nn.Module, *, frozen: Collection[str] = (),
        device: str = "cpu", is_alone: bool = False, rate: float = 0.01, weight_decay: float = 0.0,
        weights: Weights | None = None, compiler: str = "", fp8: str = "off",
        rules: Sequence[Any] = (), optimizer: str = "adamw", router_loss: float | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.family, self.seat = plan, family, seat_of(plan, rank)
        self.dtype = next(model.parameters()).dtype
        is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self.groups: Any = NO_GROUPS if is_alone else make_groups(plan, rank, timeout_s=TIMEOUT_S, is_tied=is_tied)
        if not is_alone and dist.get_backend() == "nccl":
            connect(self.groups, plan, torch.device(device))
        self.router_loss = router_loss_of(model, family, router_loss, frozen)
        self.model = made = apply_plan(
            model, family, plan, self.seat, self.groups, torch.device(device), frozen=frozen, weights=weights,
            compiler=compiler, fp8=fp8, kernel=attention.resolve(attention.AUTO, device, self.dtype),
            rates=OptimizerSettings(rate, weight_decay, rules=tuple(rules), optimizer=optimizer),
        )  # fmt: skip
        self.stages, self.parts, self.optimizer, self.reducer = made.stages, made.parts, made.optimizer, made.reducer
        for part, stage in zip(self.seat.parts, self.stages, strict=True):
            m = plan.module(part.module)
            flags = [getattr(layer, "gradient_checkpointing", False) for layer in stage.layers]
            num_offloaded = m.offloaded[self.seat.stage] if m.offloaded else 0
            assert sum(flags) == m.num_recomputed[self.seat.stage] + num_offloaded
        self.stage_of = {part.module: stage for part, stage in zip(self.seat.parts, self.stages, strict=True)}
        self.engine = Engine(made)
        if (part := self.seat.part(LLM)) is not None:
            self.router_loss.watch(dict(enumerate(self.stage_of[LLM].layers, part.layers[0])))

    @property
    def names(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that the rank holds, or holds parts of, by their global names."""
        return {n: p for stage in self.stages for n, p in stage.names.items()}

    def feed(self, source: SampleSource, **options: Any) -> Feed:
        return Feed(
            source, self.family, self.plan, self.seat, self.stage_of, dtype=self.dtype,
            fills=self.groups.runs_alike, **options,
        )  # fmt: skip

    def prepare(self, source: SampleSource, step_plan: StepPlan) -> PreparedStep:
        return self.feed(source).prepare(step_plan)

    def step(
        self, source: SampleSource, batch: Sequence[SampleShape], step_plan: StepPlan, bad: Collection[int] = (),
        is_training: bool = True,
    ) -> StepTrace:  # fmt: skip
        """The passes of a global batch; samples at the positions in `bad` carry no loss."""
        healthy = torch.tensor([position not in bad for position in range(len(batch))])
        self.router_loss.begin(step_plan, healthy, source)
        return self.run(self.prepare(source, step_plan).microbatches, batch, bad, is_training)

    def run(
        self, microbatches: Sequence[MicrobatchInput | None], batch: Sequence[SampleShape], bad: Collection[int] = (),
        is_training: bool = True,
    ) -> StepTrace:  # fmt: skip
        """The same of a step that was prepared."""
        healthy = torch.tensor([position not in bad for position in range(len(batch))])
        tokens = sum(s.num_supervised_tokens for s, good in zip(batch, healthy, strict=True) if good)
        masked = [given and given.masked(healthy) for given in microbatches]
        last = self.reducer.expect_last_backward
        return self.engine.run(masked, num_loss_tokens=tokens, before_last_backward=last, is_training=is_training)

    def reduce(self, trace: StepTrace) -> tuple[float, float]:
        """Sums of gradients, left in `.grad`; their norm and the loss of the global batch."""
        self.reducer.reduce()
        self.router_loss.end(self.groups.control)
        return self.reducer.totals(trace.loss)[:2]

    def update(self, trace: StepTrace, rate: float, max_norm: float) -> tuple[float, float]:
        """What comes behind the passes of a step; gradient norm and loss of the global batch."""
        norm, loss = self.reduce(trace)
        self.reducer.clip(norm, max_norm)
        self.optimizer.step(rate)
        self.reducer.zero()
        return norm, loss

    def trainer(
        self, settings: LoopSettings, source: SampleSource, plans: Any, hooks: Hooks, **options: Any
    ) -> Trainer:  # fmt: skip
        return Trainer(
            settings=settings, model=self.model, engine=self.engine, feed=self.feed(source), source=source, plans=plans,
            hooks=hooks, router_loss=self.router_loss, **options,
        )  # fmt: skip


def weights_come_late() -> list[Any]:
    """From now on weights that another replica has updated are NaN until they are waited for; which are missing."""
    send, missing = dist.broadcast, list[Any]()

    def broadcast(flat: torch.Tensor, *, group: dist.ProcessGroup, group_src: int, async_op: bool) -> Any:
        if group.rank() == group_src:
            return send(flat, group=group, group_src=group_src, async_op=async_op)
        found = torch.empty_like(flat)
        work = send(found, group=group, group_src=group_src, async_op=async_op)
        flat.fill_(torch.nan)

        def wait() -> None:
            work.wait()
            flat.copy_(found)
            missing.remove(late)

        late = SimpleNamespace(wait=wait)
        missing.append(late)
        return late

    zero.dist = SimpleNamespace(**vars(dist) | {"broadcast": broadcast})  # in this process
    return missing
