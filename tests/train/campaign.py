"""A training job whose ranks are killed: started, killed at a chosen moment, and started again until it is done.

Ranks run the real loop, engine and checkpointer on synthetic samples; there is no store, no scheduler and no launcher,
so that ten kills take a minute. A rank kills itself at its moment, as hard as anybody could. Rank 0 writes down every
step it has made, with the samples of its global batch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dflop.data.sample_order import SampleOrder
from dflop.records import Plan, SampleShape, StepObservation
from dflop.train.checkpoint import Checkpointer
from dflop.train.loop import Hooks, Trainer
from dflop.train.plan_source import PlanMessage
from tests.train.rank import Rank, loop_settings
from tests.train.ranks import PRELOAD
from tests.train.synthetic import SyntheticSource, family, make_shapes, make_step_plan, tiny_model

STEP = "step"
WRITES = ("files begun", "files written", "rename")
"""Moments of a checkpoint, the last on rank 0 only: before its files, behind them, before the folder gets its name."""
HALF_WRITTEN = "half-written.txt"
PATIENCE_S = 150.0
GRACE_S = 5.0
"""How long survivors have to end by themselves."""


@dataclass(frozen=True)
class Job:
    """What is trained."""

    folder: Path
    num_steps: int
    num_samples: int
    batch_size: int
    checkpoint_every: int = 2

    @property
    def order(self) -> SampleOrder:
        return SampleOrder(5, self.num_samples, self.batch_size)

    @property
    def shapes(self) -> list[SampleShape]:
        return make_shapes(self.num_samples, seed=3, kinds=("image", "video"))

    @property
    def records_file(self) -> Path:
        return self.folder / "records.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class Kill:
    """SIGKILL of one rank."""

    rank: int
    moment: str
    """`STEP` or one of `WRITES`."""
    number: int
    """Behind how many steps of this start; or in which of its checkpoints, from 1."""


@dataclass(frozen=True)
class Record:
    """A step, as rank 0 saw it."""

    attempt: int
    step: int
    loss: float
    grad_norm: float
    samples: tuple[int, ...]


class EpochPlans:
    """Step plans over the batches of an order."""

    def __init__(self, plan: Plan, shapes: Sequence[SampleShape], order: SampleOrder) -> None:
        self._plan, self._shapes, self._order = plan, shapes, order

    def get(self, step: int) -> PlanMessage:
        batch = [self._shapes[i] for i in self._order.batch(step)]
        return PlanMessage(make_step_plan(self._plan, batch, step, text_only_slot=False), {})


def start_until_killed(job: Job, plan: Plan, attempt: int, kill: Kill | None) -> list[str]:
    """One start of the job, to its end or until a rank is killed; returns when no process is left.

    Returns:
        Names of what was in the making in the folder of checkpoints when the rank was killed.

    Raises:
        AssertionError: the job ended before the kill, or did not end well without one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    job.folder.mkdir(exist_ok=True)
    ranks = [
        context.Process(target=_train, args=(rank, job, plan, attempt, kill if kill and kill.rank == rank else None))
        for rank in range(plan.num_processes)
    ]
    try:
        for process in ranks:
            process.start()
        if kill is None:
            for process in ranks:
                process.join(PATIENCE_S)
            assert [p.exitcode for p in ranks] == [0] * len(ranks), _log(job, attempt)
            return []
        ranks[kill.rank].join(PATIENCE_S)
        assert ranks[kill.rank].exitcode == -signal.SIGKILL, f"{kill}: {_log(job, attempt)}"
        for process in ranks:
            process.join(GRACE_S)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    return (job.folder / HALF_WRITTEN).read_text().split()


def records(job: Job) -> list[Record]:
    """All steps that rank 0 has made, also those that were made again later."""
    rows = (json.loads(line) for line in job.records_file.read_text().splitlines())
    return [Record(**{**row, "samples": tuple(row["samples"])}) for row in rows]


def _train(rank: int, job: Job, plan: Plan, attempt: int, kill: Kill | None) -> None:
    """Body of a rank."""
    with (job.folder / f"log-{attempt}-{rank}.txt").open("w") as log:
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    rendezvous = f"file://{job.folder}/rendezvous-{attempt}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=plan.num_processes)
    at = _moments(job, kill)

    def note(seen: StepObservation) -> None:
        if rank == 0:
            _write_down(job, attempt, seen)
        at(STEP)

    trainer = _trainer(rank, job, plan, Hooks(note, _no_bad_sample))
    at(STEP)
    trainer.run()
    dist.barrier()
    dist.destroy_process_group()


def _write_down(job: Job, attempt: int, seen: StepObservation) -> None:
    samples = [int(i) for i in job.order.batch(seen.step)]
    with job.records_file.open("a") as file:
        row = {"attempt": attempt, "step": seen.step, "loss": seen.loss, "grad_norm": seen.grad_norm}
        file.write(json.dumps({**row, "samples": samples}) + "\n")


def _no_bad_sample(*event: Any) -> None:
    raise AssertionError(event)


def _trainer(rank: int, job: Job, plan: Plan, hooks: Hooks) -> Trainer:
    it = Rank(rank, plan, family(), tiny_model(), weight_decay=0.01)
    source = SyntheticSource(job.shapes)
    settings = loop_settings("campaign", job.num_steps, 0.003, warmup_steps=3, checkpoint_every=job.checkpoint_every)
    checkpointer = Checkpointer(job.checkpoints, it.stages, it.optimizer, it.groups, it.parts, keep=2)
    return it.trainer(settings, source, EpochPlans(plan, job.shapes, job.order), hooks, checkpointer=checkpointer)


def _moments(job: Job, kill: Kill | None) -> Callable[[str], None]:
    """What is called at every moment and kills the process at one of them; moments of checkpoints are patched in."""
    seen = {STEP: -1, "files begun": 0}

    def at(moment: str) -> None:
        if moment in seen:
            seen[moment] += 1
        number = seen[STEP if moment == STEP else "files begun"]
        if kill is not None and (moment, number) == (kill.moment, kill.number):
            (job.folder / HALF_WRITTEN).write_text(" ".join(p.name for p in job.checkpoints.glob(".tmp-*")))
            os.kill(os.getpid(), signal.SIGKILL)

    def write_data(*args: Any, **kwargs: Any) -> Any:
        at("files begun")
        result = written(*args, **kwargs)
        at("files written")
        return result

    def replace(source: Any, target: Any) -> None:
        if target.parent == job.checkpoints:
            at("rename")
        renamed(source, target)

    written, renamed = dcp.FileSystemWriter.write_data, os.replace
    dcp.FileSystemWriter.write_data, os.replace = write_data, replace  # in this process
    return at


def _log(job: Job, attempt: int) -> str:
    return "\n".join(path.read_text() for path in sorted(job.folder.glob(f"log-{attempt}-*.txt")))


def counted(found: Sequence[Record]) -> Iterator[Record]:
    """Of every step the run of it that counts: the last one, for what came before it was lost with its job."""
    last = {record.step: record for record in found}
    return iter(sorted(last.values(), key=lambda record: record.step))
