"""The training job, followed to the end of its stage or until another plan pays; and the comparison behind it.

While a job runs, round after round: rows come home, decisions are told, new ones are made, and sizes whose costs are
doubtful are timed again.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflop.config import Config
from dflop.correct.drift_detector import DRIFT_COST
from dflop.errors import ConfigError, CostError, Interrupted, LaunchError, TrainError
from dflop.launch import JobHandle, JobState, Journal, Launcher
from dflop.learn.remeasure import Doubt, find_doubts, judge, new_doubts, read_doubts, write_doubts
from dflop.records import Correction, CostTable, Decision, Measurement
from dflop.run.batches import COMPARE, TRAIN
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.run.training_claim import POLL_S, trainer_of
from dflop.steps import replanning, submit
from dflop.steps.follow import Listener, Meanwhile, follow_jobs, ingest_run, refuse_if_cancelled
from dflop.steps.next_plan import came_to_nothing, live_job
from dflop.steps.planning import bound_family
from dflop.steps.profiling import note_profile
from dflop.steps.replanning import ADVISED, DONE, FAILED, REPROFILE, STAY, Advice, spool_decision
from dflop.store.ingest import ingest
from dflop.store.lease import Claim
from dflop.store.reader import Reader
from dflop.store.spool import spool_rows


@dataclass(frozen=True, slots=True)
class Trained:
    """How far a run has trained."""

    next_step: int
    """First step that is left."""
    is_over: bool
    """Whether none is."""
    advice: Advice | None = None
    """What the job made way for, if that was decided in this process."""


def trained_so_far(run: RunDir, launcher: Launcher) -> Trained:
    """How far a run has trained; a job that lives is still to be followed."""
    step = run.next_step()
    return Trained(step, step >= run.config().train.num_steps and live_job(run, launcher) is None)


async def train(run: RunDir, launcher: Launcher, to: Listener) -> Trained:
    """Follows the training job, adopted or submitted, until it has ended or made way for another plan.

    On Slurm a job that had to stop with a checkpoint, for its time limit or somebody else's job, has trained so far:
    another one goes on. On this machine whoever told it to stop meant it.

    Raises:
        ConfigError: the run has no plan yet.
        Interrupted: it was stopped; on Slurm only if it made no progress.
        LaunchError: it failed.
        TrainError: it did nothing although there is something to do.
    """
    if not run.has_plan():
        raise ConfigError("the run has no plan yet", where=str(run.path), hint="plan first; dflop train does all steps")
    config, first = run.config(), run.next_step()
    rounds = _Rounds(run, launcher, to)
    try:
        results = await _follow(run, launcher, TRAIN, to, meanwhile=rounds.round, every_s=config.replan.check_every_s)
    except (Interrupted, LaunchError) as error:
        # It stopped as it was told to, or was still in the queue when it was.
        if run.is_replanning() and _last_state(run, TRAIN) in (JobState.INTERRUPTED, JobState.CANCELLED):
            to.say("the job stopped for another plan")
        elif isinstance(error, Interrupted) and config.cluster.backend == "slurm" and run.next_step() > first:
            to.say(f"{error.what.splitlines()[0]}; resuming from step {run.next_step()} in another job")
        else:
            raise
    else:
        first_of_job, end, now = results[0]["first_step"], results[0]["num_steps"], run.next_step()
        if first_of_job == end and now < end:
            raise TrainError(
                f"the job trained {end} steps, the newest checkpoint seen here has {now}",
                where=str(run.checkpoints),
                hint="the run directory must be the same file system on the nodes and here",
            )
        if run.is_replanning() and now >= config.train.num_steps:
            # It was at its last steps when it was told, and had no need to stop.
            if rounds.advice is not None:
                came_to_nothing(run, config, rounds.advice, "training ended first")
            run.mark_replanning(False)
    finally:
        await rounds.close()
    rounds.is_over = True
    await rounds.tell()
    # Read anew, as the job did: a person may have changed how far it goes.
    return Trained(run.next_step(), run.next_step() >= run.config().train.num_steps, rounds.advice)


def _last_state(run: RunDir, mode: str) -> JobState | None:
    """State of the newest job that trains or compares; None where there is none."""
    _, state = Journal(run.path, run.run_id).latest().get(submit.train_key(run, mode), (None, None))
    return state


def _is_latest(run: RunDir, mode: str, holder: Claim) -> bool:
    """Whether a run is held by a process of the newest job that trains or compares."""
    handle, _ = Journal(run.path, run.run_id).latest().get(submit.train_key(run, mode), (None, None))
    return handle is not None and holder.job.split()[:1] + holder.job.split()[-1:] == [handle.backend, handle.job_id]


def wants_comparison(run: RunDir) -> bool:
    """Whether the data-blind comparison is still to be trained."""
    return run.config().compare.num_batches > 0 and _last_state(run, COMPARE) != JobState.DONE


async def compare(run: RunDir, launcher: Launcher, to: Listener) -> None:
    """Train the first batches under both policies.

    Raises:
        LaunchError: the job failed.
    """
    await _follow(run, launcher, COMPARE, to)
    await ingest_run(run, to.say)


async def _follow(
    run: RunDir, launcher: Launcher, mode: str, to: Listener, *, meanwhile: Meanwhile | None = None, every_s: float = 60
) -> list[Any]:
    """Results of the tasks of the job that trains or compares: one that somebody started, else one that is submitted.

    Raises:
        Interrupted, LaunchError: as `follow_jobs`.
    """
    spec = submit.train_job(run, run.config(), mode, run.plan().num_processes)
    was_announced = False
    while True:
        holder = await asyncio.to_thread(trainer_of, run, mode)
        if holder is not None and await asyncio.to_thread(live_job, run, launcher, mode) is None:
            refuse_if_cancelled(run)  # processes that no launcher knows: only their claim says that they live
            if not was_announced:
                to.say(f"run {run.run_id} is being trained by {holder}; waiting for it")
            was_announced = True
            await asyncio.sleep(POLL_S)
            continue
        try:
            [results] = await follow_jobs(
                run, launcher, [spec], to, keep_done=False, meanwhile=meanwhile, every_s=every_s
            )
        except LaunchError as error:
            # Another job may have held the run when this one began. What still lives of this one is no other job.
            holder = await asyncio.to_thread(trainer_of, run, mode)
            if holder is None or _is_latest(run, mode, holder):
                raise
            to.say(f"{error.what.splitlines()[0]}; following the job that trains")
        else:
            return results


class _Rounds:
    """What is done round after round while one training job runs."""

    def __init__(self, run: RunDir, launcher: Launcher, to: Listener) -> None:
        self._run, self._launcher, self._to = run, launcher, to
        self._config = run.config()
        self.advice: Advice | None = None
        """What the job was told to stop for."""
        self.is_over = False
        """Whether all rows are to be in a snapshot; before, those of every few minutes."""
        self._probing: asyncio.Task[None] | None = None
        self._began_at_s = time.time()
        self._told: set[tuple[float, str, str]] = set()

    async def round(self, handle: JobHandle) -> None:
        """One round; a job that is to stop is told so again in each."""
        await self.tell()
        if not self._run.is_replanning():
            advice = await asyncio.to_thread(replanning.consider, self._run, self._config, self._to.say)
            if advice is not None and advice.is_to_act and self._config.replan.mode == "act":
                self.advice = advice
                self._run.mark_replanning(True)
        if self._run.is_replanning():
            await asyncio.to_thread(self._launcher.interrupt, handle)
        else:
            await self._probe()

    async def tell(self) -> None:
        """Ingests, and says what was decided since this process follows the job, each decision once."""
        await ingest_run(self._run, lambda _: None, is_urgent=self.is_over)  # not worth a line every round
        # Not decisions themselves: their numbers may be NaN, which equals nothing.
        found = {(d.observed_at_s, d.kind, d.subject): d for d in await asyncio.to_thread(self._decisions)}
        for key, decision in found.items():
            if key not in self._told:
                kind = decision.kind.replace("_", " ")
                words = f"{kind}, {decision.subject}: {decision.verdict}: {decision.detail}"
                self._to.say(f"step {decision.step}: {words}")
                self._to.decided(decision)
        self._told.update(found)

    async def close(self) -> None:
        """Ends what still goes on beside the job."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    def _decisions(self) -> Sequence[Decision]:
        with Reader(self._config.store) as reader:
            return [d for d in reader.decisions(self._run.run_id) if d.observed_at_s >= self._began_at_s]

    async def _probe(self) -> None:
        """Has doubtful sizes timed again, once there are some, where there is a place for it."""
        is_busy = self._probing is not None and not self._probing.done()
        if is_busy or not submit.has_place_beside(self._config, self._run.plan()):
            return
        doubts = await asyncio.to_thread(doubtful, self._run, self._config)
        if doubts is not None:
            self._probing = asyncio.create_task(self._reprofile(doubts), name="reprofile")

    async def _reprofile(self, doubts: Path) -> None:
        say = self._to.say
        for spec in submit.reprofile_jobs(self._run, self._config, doubts):
            try:
                # Only lines: how far the training is stands where people look for it.
                await follow_jobs(self._run, self._launcher, [spec], Listener(say), keep_done=False)
            except (LaunchError, Interrupted) as error:
                say(f"{spec.name}: {error.what}")  # that it measured nothing is judged below
        await asyncio.to_thread(settle, self._run, self._config, doubts, say)


def doubtful(run: RunDir, config: Config) -> Path | None:
    """A file of what is worth timing again and was not yet; noted as asked. Rows should have been ingested just before.

    Where a run may only advise, that it would be is noted as a decision, and None returned.
    """
    if not config.replan.reprofile or config.replan.mode == "off":
        return None
    with Reader(config.store) as reader:
        corrections = reader.records(Correction, where={"run_id": run.run_id})
        decisions = reader.decisions(run.run_id)
    doubts = new_doubts(run, find_doubts(corrections, run.cost_tables(), decisions))
    file = write_doubts(run, doubts) if doubts else None
    if config.replan.mode != "advise":
        return file
    for doubt in doubts:
        detail = f"{doubt.subject}: {doubt.factor:.2f}x of the prediction together with other sizes, profiling again"
        spool_decision(run, config, _decision(decisions, doubt, ADVISED, detail, doubt.factor, 1.0))
    return None


def settle(run: RunDir, config: Config, file: Path, say: Say) -> list[Decision]:
    """Judges what was timed of a file, fits tables anew where the old ones are wrong, and tells of both.

    New tables are there for the next plan; a job that runs keeps those of its plan. Ingests before and after.
    """
    started_s, in_use = time.time(), {table.module: table for table in run.cost_tables()}
    key = run.cost_tables()[0].profile_key
    ingest(config.store)
    with Reader(config.store) as reader:
        measurements = reader.records(Measurement, where={"profile_key": key})
        known = {t.table_id for t in reader.records(CostTable, where={"profile_key": key})}
        decisions, before = reader.decisions(run.run_id), reader.profile(key)
    specs = {spec.module: spec for spec in bound_family(config).specs()}
    found, tables = [], list[CostTable]()
    for doubt in read_doubts(file):
        own = [m for m in measurements if m.module == doubt.module]
        try:
            judged = judge(doubt, in_use[doubt.module], own, specs[doubt.module])
        except CostError as error:
            found.append(_decision(decisions, doubt, FAILED, error.what, math.nan, math.nan))
            continue
        tables += [t for t in judged.tables if t.table_id not in known]
        verdict, seconds = DONE if judged.tables else STAY, (judged.measured_s, judged.before_s)
        found.append(_decision(decisions, doubt, verdict, judged.detail, *seconds))
    if tables:
        spool_rows(config.store, run.run_id, "refit", (replace(table, fitted_at_s=time.time()) for table in tables))
        counts, inputs = [{"num_measurements": len(measurements)}], json.loads(before.inputs if before else "{}")
        note_profile(run, key, "model", counts, time.time() - started_s, inputs)
    for decision in found:
        say(f"{decision.kind}: {decision.detail}")
        spool_decision(run, config, decision)
    ingest(config.store)
    return found


def _decision(
    decisions: list[Decision], doubt: Doubt, verdict: str, detail: str, measured: float, expected: float
) -> Decision:
    """At the step of the drift that it answers, which changes no plan either."""
    drift = max((d for d in decisions if d.kind == DRIFT_COST), key=lambda d: (d.attempt, d.step))
    return replace(
        drift, kind=REPROFILE, subject=doubt.subject, verdict=verdict, measured=measured, expected=expected,
        detail=detail, observed_at_s=time.time(),
    )  # fmt: skip
