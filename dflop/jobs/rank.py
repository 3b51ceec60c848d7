"""One rank of a training job: what it is put together from, and what it does and reports around its steps."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.data.tokens import ChatTokenizer
from dflop.errors import TrainError
from dflop.jobs.fallback_plan import quick_planner, validation_plans
from dflop.jobs.rank_setup import peak_memory
from dflop.jobs.sample_source import DatasetSource, make_prefetcher
from dflop.jobs.spool_writer import SpoolThread
from dflop.jobs.supervisor import Supervisor
from dflop.jobs.telemetry import SpeedCounter, Telemetry
from dflop.jobs.weights import first_weights
from dflop.models import attention
from dflop.models.family import Family
from dflop.models.generic.experts import RoutedTokens
from dflop.models.generic.llm_stage import LlmStage
from dflop.parallel.compiled import EAGER, INDUCTOR
from dflop.parallel.topology import connect, make_groups, seat_of, seats
from dflop.plan.runnable import check_plan
from dflop.records import LLM, Plan, QuarantinedSample, RunEvent, StepObservation, StepPlan
from dflop.run.batches import COMPARE, TRAIN, GlobalBatches, Stage, job_steps
from dflop.run.directory import RunDir, dataset_ref, family_of, tokenizer_of
from dflop.run.messages import say
from dflop.run.training_claim import TrainingClaim
from dflop.store.spool import SpoolWriter
from dflop.train import wire
from dflop.train.checkpoint import Checkpointer
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.liveness import Activities
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.optim import OptimizerSettings
from dflop.train.parameter_groups import check_targets
from dflop.train.plan_source import Guard, Patience, PlanSource
from dflop.train.router_loss import RouterLoss, router_loss_of
from dflop.train.signals import StopRequest
from dflop.train.stages import apply_plan
from dflop.train.validation import Validation
from dflop.train.watchdog import Watch
from dflop.train.wire import RankTimes, Store

START_PATIENCE_S = 10.0
"""For the first plan. The scheduler had the time in which the ranks loaded the model: little, if it is a small one."""
COMPARE_PATIENCE_S = 60.0
"""In a comparison, which is worth nothing with other plans than it names."""


class Rank:
    """One process of the job; `supervisor` and `claim` are rank 0's."""

    def __init__(
        self, run: RunDir, config: Config, plan: Plan, mode: str, stage: Stage, attempt: int, device: torch.device,
        store: Store, stop: StopRequest, supervisor: Supervisor | None = None, claim: TrainingClaim | None = None,
    ) -> None:  # fmt: skip
        self.run, self.config, self.plan, self.mode, self.attempt = run, config, plan, mode, attempt
        self.stage, self.device, self.store, self.stop = stage, device, store, stop
        self.supervisor, self.claim = supervisor, claim
        self.seat = seat_of(plan, dist.get_rank())
        self.shapes = run.shapes()
        self.batches = GlobalBatches(config, self.shapes)
        self.bad_held_out: set[int] = set()
        self.router_loss = RouterLoss()
        self.has_stopped_early = False
        """Whether the scheduler waits for steps that will not come."""
        self.steps = job_steps(config, mode, stage)
        self.run_id = run.run_id if mode == TRAIN else f"{run.run_id}/{COMPARE}"
        producer = f"{mode}-r{self.seat.rank}-a{attempt}"
        self.spool = SpoolThread(SpoolWriter(config.store, self.run_id, producer))
        self.telemetry = Telemetry(
            run, config, self.seat, self.run_id, attempt, self.spool, functools.partial(peak_memory, device),
            plan.has_own_cores(config.cluster.spec().max_concurrency),
        )  # fmt: skip
        self.plans = self._plans()
        self.activities = Activities()
        self.watch = Watch(
            store,
            self.seat.rank,
            [f"rank {s.rank} ({s.module} stage {s.stage} replica {s.replica})" for s in seats(plan)],
            self.activities,
            stall_s=config.train.stall_s or 0.75 * config.train.timeout_s,
            on_end=lambda: self.close(at_once=True),
        )
        wire.note(store, wire.HOST.format(self.seat.rank), socket.gethostname())
        self.watch.start()

    def leave(self, *, at_once: bool) -> None:
        """End together with all other ranks: the first process that is gone ends a job, and rank 0 serves the store."""
        self.watch.close()
        self.close(at_once=at_once)
        dist.barrier()
        if self.claim is not None:
            self.claim.release()

    def close(self, *, at_once: bool) -> None:
        """Write what is left. A scheduler whose job ends early waits for observations that never come."""
        if self.supervisor is not None:
            self.supervisor.stop(at_once=at_once)
        self.telemetry.close()
        self.spool.close()

    def train(self) -> int:
        """Train to the last step; returns the first one that was run."""
        tokenizer = tokenizer_of(self.config)
        family = family_of(self.config, tokenizer.vocab_size)
        if self.supervisor is not None:
            num_devices, frozen = self.plan.num_processes / self.config.cluster.ranks_per_gpu, self.stage.frozen
            self.telemetry.speed = SpeedCounter(self.config, family, self.batches, self.steps, num_devices, frozen)
        return self._trainer(family, tokenizer).run()

    def _trainer(self, family: Family, tokenizer: ChatTokenizer) -> Trainer:
        """Model, optimizer, engine, feed and checkpoints, put together; collective over all ranks."""
        config, plan, seat, device = self.config, self.plan, self.seat, self.device
        check_plan(plan, family.specs())
        llm = next(spec for spec in family.specs() if spec.module == LLM)
        groups = make_groups(plan, seat.rank, timeout_s=config.train.timeout_s, is_tied=llm.is_tied)
        if device.type == "cuda":  # gloo has connected all ranks by now
            connect(groups, plan, device)
        dtype = getattr(torch, config.model.dtype)
        kernel = attention.resolve(config.model.attention, device.type, dtype)
        if seat.rank == 0:
            say(f"attention: {kernel}" + ("; layers of encoders and LLM are compiled" if config.train.compile else ""))
        model, weights, _, base = first_weights(config, family, tokenizer)
        train = config.train
        self.router_loss = router_loss_of(model, family, train.router_loss, self.stage.frozen)
        if seat.rank == 0 and self.router_loss.note:
            say(self.router_loss.note)
        check_targets(train.groups, family.modules, [name for name, _ in model.named_parameters()])
        rates = OptimizerSettings(
            train.learning_rate,
            train.weight_decay,
            train.betas,
            train.eps,
            train.ema_decay,
            train.groups,
            train.optimizer,
        )
        made = apply_plan(
            model, family, plan, seat, groups, device, kernel=kernel, rates=rates, frozen=self.stage.frozen,
            weights=weights, compiler=INDUCTOR if train.compile else EAGER, fp8=train.fp8,
        )  # fmt: skip
        if (part := seat.part(LLM)) is not None:
            (stage,) = (stage for stage in made.stages if isinstance(stage, LlmStage))
            layers = dict(enumerate(stage.layers, part.layers[0]))
            self.router_loss.watch(layers)
            self.telemetry.routed = RoutedTokens(layers, plan.module(LLM).parallel.ep)
        source = DatasetSource(dataset_ref(config), family, self.shapes)
        stage_of = {part.module: stage for part, stage in zip(seat.parts, made.stages, strict=True)}
        checkpointer = None
        if self.mode == TRAIN:  # a comparison saves and resumes nothing
            checkpointer = Checkpointer(
                self.run.checkpoints, made.stages, made.optimizer, groups, made.parts,
                keep=config.train.keep_checkpoints, base=base, on_failure=self._not_saved,
            )  # fmt: skip
        feed = Feed(
            source, family, plan, seat, stage_of, prefetcher=make_prefetcher(config, source, device.type),
            activity=self.activities.feed, dtype=dtype, pins=device.type == "cuda", fills=groups.runs_alike,
        )  # fmt: skip
        first_step = self.stage.first_step if self.mode == TRAIN else 0
        return Trainer(
            settings=LoopSettings(
                config.train, self.run_id, self.attempt, len(self.steps), self.stage.learning_rate, first_step
            ),
            model=made,
            engine=Engine(made, self.activities.main),
            feed=feed,
            source=source,
            plans=self.plans,
            hooks=Hooks(
                self._observed,
                self._bad_sample,
                self._before_checkpoint,
                self.stop.is_set,
                self.telemetry.traced,
                self._event,
                functools.partial(self._trained, source),
                functools.partial(self._validated, source),
            ),
            checkpointer=checkpointer,
            activities=self.activities,
            validation=self._validation(),
            router_loss=self.router_loss,
        )

    def _validation(self) -> Validation | None:
        """What training validates on, from rank 0; collective."""
        if self.mode != TRAIN or not self.batches.validated:
            return None
        step_plans: list[Any] = [None]
        if self.seat.rank == 0:
            step_plans = [validation_plans(self.run, self.config, self.plan, self.batches)]
        dist.broadcast_object_list(step_plans, src=0)
        wanted = self.config.validation
        return Validation(step_plans[0], wanted.every_steps, wanted.keep_best, wanted.patience)

    def _trained(
        self, source: DatasetSource, step: int, step_plan: StepPlan, losses: Mapping[int, float],
        norm_of: Mapping[str, float],
    ) -> None:  # fmt: skip
        if self.seat.rank == 0 and self.mode == TRAIN:
            self.telemetry.saved(step, step_plan)
            self.telemetry.norms(step, norm_of)
            self.telemetry.routers(step, self.router_loss)
            if source.num_sources > 1:
                self.telemetry.losses(step, TRAIN, losses, source)

    def _validated(self, source: DatasetSource, step: int, losses: Mapping[int, float], elapsed_s: float) -> None:
        if self.seat.rank == 0:
            say(f"validation after step {step}: {self.telemetry.validated(step, losses, source, elapsed_s)}")

    def _plans(self) -> PlanSource:
        timeout_s = self.config.train.timeout_s
        if self.supervisor is None:
            return PlanSource(self.store, self.seat.rank, timeout_s=timeout_s)
        patience = Patience(min(START_PATIENCE_S, timeout_s / 2), self.config.train.schedule_patience_frac)
        if self.mode == COMPARE:
            patience = Patience(min(COMPARE_PATIENCE_S, timeout_s / 2), None)
        quick = quick_planner(
            self.run, self.config, self.plan, self.mode, self.run_id, self.batches, self.store, self._event
        )
        guard = Guard(quick, self.supervisor.is_alive, patience, self._event, self.spool.put)
        return PlanSource(self.store, self.seat.rank, timeout_s=timeout_s, guard=guard)

    def _event(self, step: int, kind: str, detail: str) -> None:
        """Report what concerns the whole job, which is rank 0's to do."""
        self.has_stopped_early |= kind == "stopped_early"
        if self.seat.rank != 0:
            return
        say(f"step {step}: {kind.replace('_', ' ')}: {detail}")
        self.spool.put(RunEvent(self.run_id, self.mode, self.attempt, step, kind, detail, time.time()))

    def _not_saved(self, error: TrainError) -> None:
        """Note a failed save: the writing thread of every rank calls this, rank 0's reaches the store."""
        self.activities.note(error)
        self._event(self.activities.main.step, "checkpoint_failed", str(error))
        if self.seat.rank != 0:
            say(str(error))

    def _observed(self, seen: StepObservation) -> None:
        line = self.telemetry.observed(seen)
        wire.send_times(self.store, RankTimes.of(seen))
        if self.supervisor is not None:
            say(f"step {seen.step}  {seen.step + 1}/{len(self.steps)} done  {line}")
            # A signal to all processes of the job has ended it, too.
            if not self.stop.is_set():
                self.supervisor.tend(seen.step, self._event)

    def _before_checkpoint(self) -> dict[str, Any]:
        if self.claim is not None:
            self.claim.check()
        self.spool.flush()
        return {"learned": wire.noted(self.store, wire.LEARNED, {})}

    def _bad_sample(self, step: int, sample_index: int, path: str, reason: str) -> None:
        if step < 0 and sample_index in self.bad_held_out:
            return  # as in the validation before
        self.bad_held_out |= {sample_index} if step < 0 else set()
        shape = next(s for s in self.shapes if s.sample_index == sample_index)
        key, sample_id = shape.profile_key, shape.sample_id
        say(f"{'validation' if step < 0 else f'step {step}'}: sample `{sample_id}` carries no loss: {path}: {reason}")
        self.spool.put(
            QuarantinedSample(key, sample_index, sample_id, "train", path, reason, self.run_id, max(step, -1))
        )
