"""The training loop of one rank: fetch the step's plan, run it, reduce, update, observe, checkpoint.

Everything that can happen ahead does: while step t computes, a thread holds step t + 1's plan, decodes its media and
agrees with the other ranks on what is broken in it. Between two steps a rank waits for nobody but that thread. The loop
knows neither files of the store nor Prefect nor Slurm; `jobs/train.py` hands it callables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dflop.models.build import Stage
from dflop.parallel.topology import Groups, Seat
from dflop.records import MicrobatchSpan, Plan, StepObservation
from dflop.train.checkpoint import Checkpointer
from dflop.train.engine import Engine, StepTrace
from dflop.train.feed import Feed, PreparedStep, SampleSource
from dflop.train.plans import PlanSource
from dflop.train.reduce import GradientReducer
from dflop.train.wire import PlanMessage


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Numbers the loop needs; see `TrainConfig` for their meaning."""

    run_id: str
    attempt: int
    num_steps: int
    learning_rate: float
    warmup_steps: int
    max_grad_norm: float
    checkpoint_every: int


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the loop tells the outside; unless it says so a hook must not block."""

    on_observation: Callable[[StepObservation], None]
    on_bad_sample: Callable[[int, int, str, str], None]
    """(step, sample index, path, reason), on the rank that failed to decode it; called by the feed thread."""
    before_checkpoint: Callable[[int], None] = lambda next_step: None
    """(next step) on every rank. What the run says of the steps before it must outlive the job once this returns: no
    resumed job says it again. The only hook that may block."""


@dataclass(frozen=True, slots=True)
class _ReadyStep:
    """A step that can begin."""

    message: PlanMessage
    prepared: PreparedStep
    healthy: torch.Tensor
    """bool `[global batch]`, the same on every rank."""
    num_loss_tokens: int
    schedule_wait_s: float


class Trainer:
    """Binds the parts of one rank; `run` does the work."""

    def __init__(
        self,
        *,
        settings: LoopSettings,
        plan: Plan,
        seat: Seat,
        stages: Sequence[Stage],
        groups: Groups,
        engine: Engine,
        feed: Feed,
        source: SampleSource,
        plans: PlanSource,
        optimizer: torch.optim.AdamW,
        hooks: Hooks,
        checkpointer: Checkpointer | None = None,
        sharded: Collection[str] = (),
    ) -> None:
        self._settings, self._plan, self._seat, self._groups = settings, plan, seat, groups
        self._engine, self._feed, self._source, self._plans = engine, feed, source, plans
        self._optimizer, self._hooks, self._checkpointer = optimizer, hooks, checkpointer
        self._reducer = GradientReducer(plan, seat, stages, groups, sharded)

    def run(self) -> int:
        """Train to the last step, resuming from the newest checkpoint; returns the first step that was run."""
        latest = self._checkpointer.load_latest() if self._checkpointer else None
        first = int(latest["next_step"]) if latest else 0
        last = self._settings.num_steps
        with ThreadPoolExecutor(1, thread_name_prefix="feed") as ahead:
            pending = ahead.submit(self._prepare, first) if first < last else None
            for step in range(first, last):
                assert pending is not None
                waiting_since = time.perf_counter()
                ready = pending.result()
                data_wait_s = time.perf_counter() - waiting_since
                pending = ahead.submit(self._prepare, step + 1) if step + 1 < last else None
                self._step(step, ready, data_wait_s)
                if self._checkpointer and ((step + 1) % self._settings.checkpoint_every == 0 or step + 1 == last):
                    self._hooks.before_checkpoint(step + 1)
                    self._checkpointer.save(step + 1, {"plan_id": self._plan.plan_id})
        return first

    def _prepare(self, step: int) -> _ReadyStep:
        since = time.perf_counter()
        message = self._plans.get(step)
        schedule_wait_s = time.perf_counter() - since
        prepared = self._feed.prepare(message.step_plan)
        healthy = self._agree_on_health(step, prepared)
        num_loss_tokens = sum(
            self._source.shape(index).num_supervised_tokens
            for index, good in zip(message.step_plan.sample_index, healthy.tolist(), strict=True)
            if good
        )
        return _ReadyStep(message, prepared, healthy, num_loss_tokens, schedule_wait_s)

    def _step(self, step: int, ready: _ReadyStep, data_wait_s: float) -> None:
        started = time.perf_counter()
        trace = self._engine.run(
            ready.prepared.microbatches, healthy=ready.healthy, num_loss_tokens=ready.num_loss_tokens
        )
        computed = time.perf_counter()
        self._reducer.reduce()
        norm, loss = self._reducer.norm_and_loss(trace.loss)
        reduced = time.perf_counter()
        self._reducer.clip(norm, self._settings.max_grad_norm)
        self._update(step)
        ended = time.perf_counter()
        self._hooks.on_observation(
            self._observe(
                step,
                ready,
                trace,
                loss,
                norm,
                step_s=ended - started,
                data_wait_s=data_wait_s,
                schedule_wait_s=ready.schedule_wait_s,
                reduce_s=reduced - computed,
                optimizer_s=ended - reduced,
            )
        )

    def _agree_on_health(self, step: int, prepared: PreparedStep) -> torch.Tensor:
        """Samples that no rank failed to decode; every rank's feed thread comes here once per step, in step order."""
        bad = torch.zeros(len(prepared.step_plan.sample_index), dtype=torch.int32)
        for position, (path, reason) in prepared.bad_samples.items():
            bad[position] = 1
            self._hooks.on_bad_sample(step, prepared.step_plan.sample_index[position], path, reason)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=self._groups.feed)
        return bad == 0

    def _update(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, self._settings)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _observe(
        self,
        step: int,
        ready: _ReadyStep,
        trace: StepTrace,
        loss: float,
        norm: float,
        **seconds: float,
    ) -> StepObservation:
        seat, message = self._seat, ready.message
        return StepObservation(
            run_id=self._settings.run_id,
            attempt=self._settings.attempt,
            step=step,
            policy=message.step_plan.policy,
            rank=seat.rank,
            module=seat.module,
            stage=seat.stage,
            dp_rank=seat.dp_rank,
            predicted_step_s=message.step_plan.predicted_step_s,
            busy_s=trace.busy_s,
            loss=loss,
            grad_norm=norm,
            num_supervised_tokens=ready.num_loss_tokens,
            observed_at_s=time.time(),
            spans=_spans(message, seat, trace),
            **seconds,
        )


def learning_rate(step: int, settings: LoopSettings) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
    return settings.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0))))


def _spans(message: PlanMessage, seat: Seat, trace: StepTrace) -> tuple[MicrobatchSpan, ...]:
    spans: Sequence[MicrobatchSpan] = [
        MicrobatchSpan(
            k, *message.predicted.get((seat.module, seat.stage, seat.dp_rank, k), (0, 0, 0, 0.0, 0.0)),
            t.forward_start_s, t.forward_s, t.backward_start_s, t.backward_s, t.forward_compute_s, t.backward_compute_s,
        )
        for k, t in sorted(trace.timings.items())
    ]  # fmt: skip
    return tuple(spans)
