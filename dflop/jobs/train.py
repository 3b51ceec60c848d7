"""One rank of a training job; also of the comparison, which is training with both policies in turn.

Started once per process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set: by the launcher, by
torchrun, or by a person's srun of `python -m dflop.jobs.train RUN_DIR train`, which translates Slurm's variables
(slurm/train.sbatch). Everything else comes from the run directory. Rank 0 also serves the key-value store and starts
the scheduler process beside itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.cost.model import CostModel
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError, DflopError, did_you_mean
from dflop.jobs.ranks import take_device
from dflop.jobs.rundir import RunDir, dataset_ref, open_run, tokenizer_of, trainable_of
from dflop.jobs.source import DatasetSource
from dflop.jobs.spooling import SpoolThread
from dflop.jobs.steps import COMPARE, TRAIN, WARMUP, GlobalBatches, job_steps
from dflop.launch.ranks import srun_environment
from dflop.models.build import LlmStage, Stage, build_model, cut_stage
from dflop.models.family import Family
from dflop.parallel.topology import Seat, make_groups, seat_of
from dflop.records import LLM, Plan, QuarantinedSample, StepObservation, to_dict
from dflop.schedule.scheduler import schedule_step
from dflop.store.spool import SpoolWriter
from dflop.train.checkpoint import Checkpointer
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.plans import PlanMessage, PlanSource, open_store, send_observation
from dflop.units import seconds

SCHEDULER_PATIENCE_S = 60.0
SCHEDULER_EXIT_S = 10.0


def main(run_path: str, mode: str) -> dict[str, float]:
    """Run this rank to the end of the job.

    Args:
        run_path: Run directory with a plan.
        mode: `train` (resumes from the newest checkpoint) or `compare` (always from the start).

    Returns:
        First step run by this start and number of steps of the job.

    Raises:
        ConfigError: no such run or mode, or not as many processes as the plan has.
        TrainError: training stopped.
    """
    if mode not in (TRAIN, COMPARE):
        raise ConfigError(f"unknown mode `{mode}`", hint=did_you_mean(mode, (TRAIN, COMPARE)))
    run = open_run(run_path)
    config, plan = run.config(), run.plan()
    rank = int(os.environ["RANK"])
    device = take_device(config)
    timeout_s = config.train.timeout_s
    dist.init_process_group(timeout=timedelta(seconds=timeout_s), backend="nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() != plan.num_processes:
        raise ConfigError(
            f"the job has {dist.get_world_size()} processes, the plan needs {plan.num_processes}",
            where=str(run.path / "plan.json"),
            hint="start as many tasks as the plan has processes",
        )
    attempt = _agree(run.claim_attempt(mode) if rank == 0 else 0)
    store, scheduler = _start_scheduler(run, mode, attempt, rank, timeout_s)
    rank_context = _Rank(run, config, plan, mode, attempt, device, store)
    try:
        first = rank_context.train(lambda: scheduler is not None and scheduler.poll() is None)
        dist.barrier()
    except BaseException:
        if scheduler is not None:
            scheduler.terminate()  # it would wait for observations that never come
        raise
    finally:
        rank_context.spool.close()
        if scheduler is not None:
            _stop(scheduler)
    dist.destroy_process_group()
    return {"first_step": first, "num_steps": len(job_steps(config, mode))}


class _Rank:
    """What one rank of the job is made of."""

    def __init__(
        self, run: RunDir, config: Config, plan: Plan, mode: str, attempt: int, device: torch.device,
        store: dist.TCPStore,
    ) -> None:  # fmt: skip
        self.run, self.config, self.plan, self.mode, self.attempt = run, config, plan, mode, attempt
        self.device, self.store = device, store
        self.seat = seat_of(plan, dist.get_rank())
        self.shapes = run.shapes()
        self.batches = GlobalBatches(config, self.shapes)
        self.steps = job_steps(config, mode)
        self.run_id = run.run_id if mode == TRAIN else f"{run.run_id}/{COMPARE}"
        producer = f"{mode}-r{self.seat.rank}-a{attempt}"
        self.spool = SpoolThread(SpoolWriter(config.store, self.run_id, producer))

    def train(self, scheduler_is_alive: Callable[[], bool]) -> int:
        config, seat = self.config, self.seat
        tokenizer = tokenizer_of(config)
        family = trainable_of(config, tokenizer.vocab_size)
        stage = _build_stage(config, family, tokenizer, seat).to(self.device)
        groups = make_groups(self.plan, seat.rank, timeout_s=config.train.timeout_s)
        # Weight decay would change tables that the model itself keeps fixed.
        trained = [p for p in stage.names.values() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=config.train.learning_rate, weight_decay=config.train.weight_decay)
        hidden_size = next(s.hidden_size for s in family.specs() if s.module == LLM)
        source = DatasetSource(dataset_ref(config), family, self.shapes)
        llm_stage = stage if isinstance(stage, LlmStage) else None
        checkpointer = None
        if self.mode == TRAIN:
            keep = config.train.keep_checkpoints
            checkpointer = Checkpointer(self.run.checkpoints, stage, optimizer, groups.control, keep)
        trainer = Trainer(
            settings=self._settings(),
            plan=self.plan,
            seat=seat,
            stage=stage,
            groups=groups,
            engine=Engine(self.plan, seat, stage, groups, self.device, hidden_size),
            feed=Feed(source, family, self.plan, seat, llm_stage),
            source=source,
            plans=self._plans(scheduler_is_alive),
            optimizer=optimizer,
            hooks=Hooks(self._observed, self._bad_sample),
            checkpointer=checkpointer,
        )
        return trainer.run()

    def _settings(self) -> LoopSettings:
        t = self.config.train
        return LoopSettings(
            run_id=self.run_id,
            attempt=self.attempt,
            num_steps=len(self.steps),
            learning_rate=t.learning_rate,
            warmup_steps=t.warmup_steps,
            max_grad_norm=t.max_grad_norm,
            checkpoint_every=t.checkpoint_every,
        )

    def _plans(self, scheduler_is_alive: Callable[[], bool]) -> PlanSource:
        cost, cluster = CostModel(self.run.cost_tables()), self.config.cluster.spec()
        limit = cluster.max_concurrency if cluster.max_concurrency < self.plan.num_processes else None

        def fallback(step: int) -> PlanMessage:
            spec = self.steps[step]
            step_plan = schedule_step(
                run_id=self.run_id,
                step=step,
                plan=self.plan,
                batch=self.batches.at(spec.batch_step),
                cost=cost,
                policy="arrival",
                max_concurrency=limit,
            )
            return PlanMessage(replace(step_plan, policy=WARMUP) if spec.label == WARMUP else step_plan, {})

        return PlanSource(
            self.store,
            self.seat.rank,
            fallback=fallback,
            scheduler_is_alive=scheduler_is_alive,
            patience_s=min(SCHEDULER_PATIENCE_S, self.config.train.timeout_s / 2),
            timeout_s=self.config.train.timeout_s,
            on_fallback=self._fell_back,
        )

    def _fell_back(self, message: PlanMessage, why: str) -> None:
        _say(f"step {message.step_plan.step + 1}: {why}; training goes on in arrival order")
        self.spool.put(message.step_plan)

    def _observed(self, seen: StepObservation) -> None:
        self.spool.put(seen)
        send_observation(self.store, seen.step, seen.rank, to_dict(seen))
        if seen.rank == 0:
            _say(
                f"step {seen.step + 1}/{len(self.steps)}  loss {seen.loss:.4f}  {seconds(seen.step_s)} "
                f"(predicted {seconds(seen.predicted_step_s)})  {seen.policy}"
            )

    def _bad_sample(self, step: int, sample_index: int, path: str, reason: str) -> None:
        shape = next(s for s in self.shapes if s.sample_index == sample_index)
        _say(f"step {step + 1}: sample `{shape.sample_id}` carries no loss: {path}: {reason}")
        self.spool.put(
            QuarantinedSample(
                profile_key=shape.profile_key,
                sample_index=sample_index,
                sample_id=shape.sample_id,
                phase="train",
                path=path,
                reason=reason,
                run_id=self.run_id,
                step=step,
            )
        )


def _build_stage(config: Config, family: Family, tokenizer: ChatTokenizer, seat: Seat) -> Stage:
    hf_config = {**family.hf_config, **family.token_ids(tokenizer.special_ids)}
    model = build_model(family, hf_config, seed=config.model.seed, dtype=getattr(torch, config.model.dtype))
    return cut_stage(model, family, seat.module, seat.layers)


def _agree(value: int) -> int:
    """Rank 0's value on every rank."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _start_scheduler(
    run: RunDir, mode: str, attempt: int, rank: int, timeout_s: float
) -> tuple[dist.TCPStore, subprocess.Popen[bytes] | None]:
    host = os.environ["MASTER_ADDR"]
    if rank != 0:
        return open_store(host, _agree(0), is_server=False, timeout_s=timeout_s), None
    store = open_store(host, 0, is_server=True, timeout_s=timeout_s)
    _agree(store.port)
    log = _scheduler_log(run, mode, attempt)
    command = [sys.executable, "-m", "dflop.jobs.scheduler", str(run.path), mode, str(attempt), host, str(store.port)]
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    _say(f"scheduler started, log in {log}")
    return store, process


def _scheduler_log(run: RunDir, mode: str, attempt: int) -> Path:
    folder = run.path / "log"
    folder.mkdir(exist_ok=True)
    return folder / f"scheduler-{mode}-{attempt}.log"


def _stop(scheduler: subprocess.Popen[bytes]) -> None:
    try:
        scheduler.wait(SCHEDULER_EXIT_S)
    except subprocess.TimeoutExpired:
        scheduler.terminate()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _main_by_hand(run_path: str, mode: str = TRAIN) -> None:
    if "RANK" not in os.environ:
        os.environ |= srun_environment(os.environ)
    main(run_path, mode)


if __name__ == "__main__":
    try:
        _main_by_hand(*sys.argv[1:])
    except DflopError as error:
        _say(f"train: {error}")
        raise SystemExit(error.exit_code) from None
