"""The training loop of one rank: fetch the step's plan, run it, reduce, update, observe, checkpoint.

Everything that can happen ahead does: while step t computes, a thread holds step t + 1's plan, decodes its media and
agrees with the other ranks on what is broken in it. Between two steps a rank waits for nobody but that thread. The loop
knows neither files of the store nor Prefect nor Slurm; `jobs/rank.py` hands it callables.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dflop.errors import Interrupted, TrainError
from dflop.records import MicrobatchSpan, StepObservation, StepPlan
from dflop.train.checkpoint import Checkpointer
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.finite import SkippedSteps, listed, suspects
from dflop.train.inputs import PreparedStep, SampleSource
from dflop.train.learning_rate import learning_rate
from dflop.train.liveness import Activities
from dflop.train.plan_source import PlanSource
from dflop.train.router_loss import RouterLoss
from dflop.train.stages import RankModel
from dflop.train.step_trace import WHOLE_STEP, Span, StepTrace, step_spans
from dflop.train.validation import Held, Validation, by_index, padded
from dflop.train.wire import PlanMessage

if TYPE_CHECKING:
    from dflop.config import TrainConfig  # the engine is measured on machines without pydantic

T = TypeVar("T")
UNKNOWN = (0, 0, 0, 0.0, 0.0)
"""What a quick plan predicts of a microbatch."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop of one start of a job runs."""

    train: TrainConfig
    """Configuration of the whole run; steps and learning rate of this job stand here."""
    run_id: str
    attempt: int
    num_steps: int
    """Behind the last step to run, counted from the first of training."""
    learning_rate: float
    first_step: int = 0
    """First step of the stage of training that ends at `num_steps`: the learning rate starts anew there."""

    def learning_rate_of(self, step: int) -> float:
        """Learning rate of a step of this stage."""
        num_steps = self.num_steps - self.first_step
        return learning_rate(step - self.first_step, num_steps, self.learning_rate, self.train)


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the loop tells the outside; unless it says so a hook must not block."""

    on_observation: Callable[[StepObservation], None]
    on_bad_sample: Callable[[int, int, str, str], None]
    """(step, sample index, path, reason), on the rank that failed to decode it; called by the feed thread. A sample
    that is held out of training has a negative step."""
    before_checkpoint: Callable[[], Mapping[str, Any]] = dict
    """On every rank; JSON values that the checkpoint keeps. What the run says of the steps before it must outlive the
    job once this returns: no resumed job says it again. The only hook that may block."""
    is_told_to_stop: Callable[[], bool] = lambda: False
    """Asked once per step on every rank; when any says yes, all stop."""
    on_spans: Callable[[int, Sequence[Span]], None] = lambda step, spans: None
    """(step, what happened in it), of traced steps; of the others their checkpoint only."""
    on_event: Callable[[int, str, str], None] = lambda step, kind, detail: None
    """(step, kind of `RunEvent`, detail) on every rank: `checkpoint_damaged` when an older one was loaded, `not_finite`
    when a step updated nothing because loss or norm are not finite, `stopped_early` when validation ends training."""
    on_totals: Callable[[int, StepPlan, Mapping[int, float], Mapping[str, float]], None] = lambda *totals: None
    """(step, its plan, summed loss of every healthy sample of its global batch, by its index, and norm of every
    module's gradient before clipping), on every rank."""
    on_validation: Callable[[int, Mapping[int, float], float], None] = lambda step, losses, elapsed_s: None
    """(step, summed loss of every sample held out of training, by its index, and how long it took), on every rank."""


@dataclass(frozen=True, slots=True)
class _ReadyStep:
    """A step that can begin."""

    message: PlanMessage
    prepared: PreparedStep
    healthy: torch.Tensor
    """bool `[global batch]`, the same on every rank."""
    num_loss_tokens: int
    asked_at_s: float
    """When its plan was asked for, on the clock of `time.perf_counter`."""
    schedule_wait_s: float


@dataclass(kw_only=True, eq=False)
class Trainer:
    """The parts of one rank, bound together; `run` does the work."""

    settings: LoopSettings
    model: RankModel
    engine: Engine
    feed: Feed
    source: SampleSource
    plans: PlanSource
    hooks: Hooks
    checkpointer: Checkpointer | None = None
    activities: Activities = field(default_factory=Activities)
    validation: Validation | None = None
    router_loss: RouterLoss = field(default_factory=RouterLoss)

    def run(self) -> int:
        """Train to the last step, resuming from the newest checkpoint; returns the first step that was run.

        Raises:
            Interrupted: the job was asked to stop; its progress is on disk. Or all that is sound is a checkpoint
                of an earlier stage, which wants other modules frozen: now it is the newest.
            TrainError: loss or gradients were not finite in several steps in a row, or weights are not.
        """
        self.activities.main.may_last("loads the newest checkpoint")
        latest = self.checkpointer.load_latest() if self.checkpointer else None
        first = int(latest["next_step"]) if latest else 0
        if latest and "fell_back_from" in latest:
            newer = f"{latest['fell_back_from']}; using the one before it"
            self.hooks.on_event(first, "checkpoint_damaged", newer)
        if latest and self.checkpointer and first < self.settings.first_step:
            self.checkpointer.take_back(latest)
            raise Interrupted(f"step {first} belongs to an earlier stage of training")
        self._saved_at_s, self._skipped = time.monotonic(), SkippedSteps(latest or {})
        self.router_loss.restore(latest or {})
        if self.validation is not None:
            self.validation.restore(latest or {}, is_new_stage=first == self.settings.first_step)
        (is_told,) = self.model.reducer.totals(0.0, (self.hooks.is_told_to_stop(),)).flags
        if is_told and first < self.settings.num_steps:
            raise Interrupted(f"stopped before step {first}, {first} of {self.settings.num_steps} steps done")
        ahead = ThreadPoolExecutor(1, thread_name_prefix="feed")
        try:
            with _collecting_between_steps():
                self._run(first, ahead)
        except BaseException:
            # Its thread may be waiting for ranks that will never come.
            ahead.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            self.feed.close()
        ahead.shutdown()
        return first

    def _run(self, first: int, ahead: ThreadPoolExecutor) -> None:
        last, main, is_due = self.settings.num_steps, self.activities.main, False
        pending = self._begin(first, ahead) if first < last else None
        for step in range(first, last):
            assert pending is not None
            main.step = step
            main.waits("its data")
            waiting_since = time.perf_counter()
            ready = pending.result()
            data_wait_s = time.perf_counter() - waiting_since
            is_last = step + 1 == last
            pending = None if is_last else self._begin(step + 1, ahead)
            validated = self._begin_validation(step, ahead, is_last=is_last)
            must_stop, is_late = self._step(step, ready, data_wait_s)
            gc.collect(1)
            self._end_if_not_finite()
            is_best = validated is not None and not must_stop and self._validate(step, validated, ahead)
            over = self.validation.over(last - step - 1) if self.validation else ""
            is_due = is_due or is_late or (step + 1) % self.settings.train.checkpoint_every == 0
            ends = must_stop or is_last or bool(over)
            if ends or is_best or (is_due and not self._skipped):
                self._save(last if over else step + 1, is_on_disk=ends)
                is_due = False
            if over:
                self.hooks.on_event(step, "stopped_early", over)
                return
            if must_stop and not is_last:
                raise Interrupted(f"stopped after step {step}, {step + 1} of {last} steps done")

    def _save(self, next_step: int, *, is_on_disk: bool) -> None:
        """Save a checkpoint; when it is needed by whoever comes next, return only when it is written."""
        self._saved_at_s = time.monotonic()
        self.activities.main.waits("weights that other ranks update")
        self.model.optimizer.wait()
        if self.checkpointer is None:
            return
        self.activities.main.may_last("checkpoint")
        began = time.perf_counter()
        of_run = self._skipped.state() | self.router_loss.state() | (self.validation.state() if self.validation else {})
        meta = {"plan_id": self.model.plan.plan_id, **of_run, **self.hooks.before_checkpoint()}
        self.checkpointer.save(next_step, meta)
        if is_on_disk:
            self.checkpointer.wait()
        if self.settings.train.trace_every_steps:
            duration_s = time.perf_counter() - began
            span = Span("checkpoint", WHOLE_STEP, began - self._started_at_s, duration_s)
            self.hooks.on_spans(next_step - 1, [span])

    def _begin(self, step: int, ahead: ThreadPoolExecutor) -> Future[_ReadyStep]:
        """Prepare a step in the feed thread."""
        return self._noted(ahead.submit(self._prepare, step))

    def _noted(self, future: Future[T]) -> Future[T]:
        """The future, which reports a lost peer at once: this thread may wait for its device."""

        def note_failure(future: Future[T]) -> None:
            if not future.cancelled() and (error := future.exception()):
                self.activities.note(error)

        future.add_done_callback(note_failure)
        return future

    def _begin_validation(self, step: int, ahead: ThreadPoolExecutor, *, is_last: bool) -> Future[Held] | None:
        """Prepare the first held-out batch, after the next step's, if validation follows this step."""
        if self.validation is None or not self.validation.is_due(step, is_last=is_last):
            return None
        return self._noted(ahead.submit(self._prepare_held_out, self.validation.step_plans[0]))

    def _validate(self, step: int, first: Future[Held], ahead: ThreadPoolExecutor) -> bool:
        """Whether these weights are the best so far, and to be kept."""
        assert self.validation is not None
        began = time.perf_counter()
        losses = self.validation.losses(
            lambda step_plan: self._noted(ahead.submit(self._prepare_held_out, step_plan)), first, self.engine,
            self.model.groups.control,
        )  # fmt: skip
        self.hooks.on_validation(step, losses, time.perf_counter() - began)
        num_tokens = sum(self.source.shape(index).num_supervised_tokens for index in losses)
        is_best = self.validation.judge(step, sum(losses.values()) / num_tokens if num_tokens else math.nan)
        return is_best and self.validation.keeps_best

    def _prepare_held_out(self, step_plan: StepPlan) -> Held:
        self.activities.feed.works("data held out of training")
        prepared = self.feed.prepare(step_plan)
        self.activities.feed.waits("other ranks' report of broken media")
        healthy = self._agree_on_health(step_plan.step, prepared)
        self.activities.feed.waits("the step before")
        return self.feed.masked(prepared, healthy), healthy

    def _prepare(self, step: int) -> _ReadyStep:
        feed = self.activities.feed
        feed.step = step
        feed.waits("its plan")
        since = time.perf_counter()
        message = self.plans.get(step)
        schedule_wait_s = time.perf_counter() - since
        feed.works("its data")
        prepared = self.feed.prepare(message.step_plan, self._published_after(step))
        feed.waits("other ranks' report of broken media")
        healthy = self._agree_on_health(step, prepared)
        num_loss_tokens = sum(
            self.source.shape(index).num_supervised_tokens
            for index, good in zip(message.step_plan.sample_index, healthy.tolist(), strict=True)
            if good
        )
        self.feed.look_ahead(self._published_after(step))
        feed.waits("the step before")
        masked = self.feed.masked(prepared, healthy)
        return _ReadyStep(message, masked, healthy, num_loss_tokens, since, schedule_wait_s)

    def _published_after(self, step: int) -> list[StepPlan]:
        """Plans of later steps whose media may be decoded ahead."""
        num_steps = min(self.settings.train.prefetch_steps - 1, self.settings.num_steps - step - 1)
        return self.plans.published_after(step, num_steps) if num_steps > 0 else []

    def _step(self, step: int, ready: _ReadyStep, data_wait_s: float) -> tuple[bool, bool]:
        """Run a step; whether any rank was told to stop, and whether a checkpoint is due by the clock."""
        # Ranks of a tensor-parallel group must draw the same random numbers.
        _reseed(self.settings.train.seed, step, self.model.seat.rank - self.model.seat.tp_rank)
        self.router_loss.begin(ready.message.step_plan, ready.healthy, self.source)
        started = self._started_at_s = time.perf_counter()
        trace = self.engine.run(
            ready.prepared.microbatches,
            num_loss_tokens=ready.num_loss_tokens,
            before_last_backward=self.model.reducer.expect_last_backward,
        )
        computed = time.perf_counter()
        self.activities.main.waits("sum of gradients")
        self.model.reducer.reduce()
        flags = (self.hooks.is_told_to_stop(), self._is_late())
        self.router_loss.end(self.model.groups.control)
        totals = self.model.reducer.totals(trace.loss, flags, padded(trace.sample_losses, len(ready.healthy)).tolist())
        norm, loss, (must_stop, is_late) = totals.norm, totals.loss, totals.flags
        reduced = time.perf_counter()
        self._update(step, ready, trace, loss, norm)
        self.engine.wait()  # else the update would count as the next step's
        ended = time.perf_counter()
        seen = self._observe(
            step, ready, trace, loss, norm,
            step_s=ended - started, data_wait_s=data_wait_s, schedule_wait_s=ready.schedule_wait_s,
            reduce_s=reduced - computed, optimizer_s=ended - reduced,
        )  # fmt: skip
        self.hooks.on_observation(seen)
        losses = by_index(ready.message.step_plan, totals.more, ready.healthy)
        self.hooks.on_totals(step, ready.message.step_plan, losses, totals.norm_of)
        if (every := self.settings.train.trace_every_steps) and step % every == 0:
            self.hooks.on_spans(step, step_spans(trace, seen, started, ready.asked_at_s))
        return must_stop, is_late

    def _update(self, step: int, ready: _ReadyStep, trace: StepTrace, loss: float, norm: float) -> None:
        """Update the weights by the gradients, or skip the step where these are not finite; then drop them."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.activities.main.works("update of the weights")
            self.model.reducer.clip(norm, self.settings.train.max_grad_norm)
            self.model.optimizer.step(self.settings.learning_rate_of(step))
            self._skipped.clear()
        else:
            batch = ready.message.step_plan.sample_index
            found = suspects(trace.losses, ready.prepared.microbatches, ready.healthy, self.model.groups.control)
            samples = sorted(batch[position] for position in found)
            self._skipped.add(step, samples)
            of_batch = f"{len(samples)} of {len(batch)} samples: {listed(samples)}"
            self.hooks.on_event(step, "not_finite", f"loss {loss:g}, gradient norm {norm:g}; no update; {of_batch}")
        self.model.reducer.zero()

    def _end_if_not_finite(self) -> None:
        try:
            self._skipped.raise_if_too_many()
        except TrainError:
            if self.checkpointer is not None:
                self.activities.main.may_last("checkpoint")
                self.checkpointer.close()  # the last good one may still be on its way to the disk
            raise

    def _is_late(self) -> bool:
        """Whether the last checkpoint is too long ago, by the clock of one rank."""
        every_s = self.settings.train.checkpoint_every_s
        return every_s > 0 and self.model.seat.rank == 0 and time.monotonic() - self._saved_at_s >= every_s

    def _agree_on_health(self, step: int, prepared: PreparedStep) -> torch.Tensor:
        """Samples that no rank failed to decode; every rank's feed thread comes here once per step, in step order."""
        bad = torch.zeros(len(prepared.step_plan.sample_index), dtype=torch.int32)
        for position, (path, reason) in prepared.bad_samples.items():
            bad[position] = 1
            self.hooks.on_bad_sample(step, prepared.step_plan.sample_index[position], path, reason)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=self.model.groups.feed)
        return bad == 0

    def _observe(
        self,
        step: int,
        ready: _ReadyStep,
        trace: StepTrace,
        loss: float,
        norm: float,
        **seconds: float,
    ) -> StepObservation:
        seat, message = self.model.seat, ready.message
        predicted = message.predicted((seat.module, seat.stage, seat.dp_rank))
        return StepObservation(
            run_id=self.settings.run_id,
            attempt=self.settings.attempt,
            step=step,
            policy=message.step_plan.policy,
            rank=seat.rank,
            module=seat.module,
            stage=seat.stage,
            dp_rank=seat.dp_rank,
            predicted_step_s=message.step_plan.predicted_step_s,
            busy_s=trace.busy_s,
            loss=loss if ready.num_loss_tokens else math.nan,
            grad_norm=norm,
            num_supervised_tokens=ready.num_loss_tokens,
            observed_at_s=time.time(),
            spans=tuple(
                MicrobatchSpan(k, *predicted.get(k, UNKNOWN), **measured)
                for k, measured in sorted(trace.timings.items())
            ),
            **seconds,
        )


@contextmanager
def _collecting_between_steps() -> Iterator[None]:
    """Python's collector would stop one rank in the middle of a step, and all others would wait for it."""
    gc.collect()
    gc.freeze()  # what is there stays, and is not looked through after every step
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _reseed(seed: int, step: int, rank: int) -> None:
    """Set the global generators, so that what a step draws depends on no step before it."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    torch.manual_seed(int(torch_seed))  # CUDA's, too
    np.random.seed(int(numpy_seed))  # noqa: NPY002, what libraries draw from without being asked
    random.seed(int(python_seed))
