"""What has to hold of a run when it is over, whatever was done to it: one line for everything that does not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflop.jobs.driver import driver_of
from dflop.jobs.rundir import RunDir
from dflop.launch import Journal, script
from dflop.launch.job import JobState
from dflop.records import JobRecord, QuarantinedSample, SampleShape, StepObservation, StepPlan
from dflop.store import durable, lease
from dflop.store.reader import Reader
from dflop.store.spool import read_spool
from dflop.train.manifest import read_latest
from tests.chaos.play import Play
from tests.chaos.stage import BATCH_SIZE, CUT, MISSING, NUM_STEPS

CODES = {0, 1, 2, 3, 4, 5, 75, 130, 143}
"""Exit codes of docs/operating.md."""
TOLERANCE = 1e-4
"""Relative, of losses: sums are made in another order when a batch is packed otherwise, for twelve steps."""
_ENDS_S = 20.0
_LEAVES_S = 30.0 + script.LOOKS_EVERY_S + script.ENDS_WITHIN_S
"""For a job to leave Slurm's queue: its script gives its tasks time, and Slurm its processes."""


def problems(play: Play, losses: Mapping[int, float] | None) -> list[str]:
    """Everything that is wrong with a run whose last command has ended well.

    Args:
        play: The run.
        losses: By step, of a run of the same seed that nothing happened to; None: there is no such run.
    """
    run = play.run
    if run is None:
        return ["there is no run directory"]
    is_altered = bool(play.must_be_left_out | play.may_be_left_out)
    on_slurm = run.config().cluster.backend == "slurm"
    return [
        *(f"another run was begun: {path.name}" for path in sorted(play.stage.runs.glob("chaos-*"))[1:]),
        *of_outputs(play),
        *of_processes(play, _LEAVES_S if on_slurm else _ENDS_S),
        *of_files(run),
        *of_samples(play, run),
        *of_steps(run),
        *of_losses(run, None if is_altered else losses),
        *(of_queue(run) if on_slurm else ()),
        *of_jobs(run),
        *of_store(play),
        *(note for note in play.notes if note.startswith("WRONG")),
    ]


def of_outputs(play: Play) -> Iterator[str]:
    """Exit codes are documented, and nobody was shown a traceback."""
    for number, ended in enumerate(play.ended):
        if ended.code not in CODES | {-9}:
            yield f"command {number} ended with {ended.code}, which is no documented exit code"
        if (at := ended.said.find("Traceback (most recent call last)")) >= 0:
            shown = " | ".join(line.strip() for line in ended.said[at:].splitlines())
            yield f"command {number} showed a traceback: {shown[:1500]}"


def of_processes(play: Play, limit_s: float) -> Iterator[str]:
    """Nothing of the run is left running."""
    deadline_s = time.monotonic() + limit_s
    while (left := play.processes()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    yield from (f"process {pid} is left: {line[:120]}" for pid, line in left.items())


def of_files(run: RunDir) -> Iterator[str]:
    """The run says that it is done, has its report and its last checkpoint, nobody drives it."""
    if run.state().get("state") != "done":
        yield f"run.json says {run.state().get('state')}"
    if not run.report_file.is_file() or run.report_file.stat().st_size < 10_000:
        yield "there is no report"
    latest = read_latest(run.checkpoints) or {}
    if latest.get("next_step") != NUM_STEPS:
        yield f"the newest checkpoint is of step {latest.get('next_step')}"
    if driver_of(run) is not None:
        yield f"it is still driven by {driver_of(run)}"
    yield from (f"left in checkpoints: {path.name}" for path in run.checkpoints.glob(f"{durable.TMP_PREFIX}*"))


def of_samples(play: Play, run: RunDir) -> Iterator[str]:
    """Every row is trained once in every epoch, or in quarantine with a reason; and none that need not be is there."""
    store, key = run.config().store, run.profile_key()
    shapes = {s.sample_index for s in run.shapes()}
    stored = {s.sample_index for s in read_spool(store, SampleShape) if s.profile_key == key}
    if stored != shapes:
        yield f"the run trains on {len(shapes)} samples, its profile has {len(stored)}"
    found = [q for q in read_spool(store, QuarantinedSample) if q.profile_key == key]
    if both := {q.sample_index for q in found if q.phase == "profile"} & shapes:
        yield f"samples {sorted(both)} are both healthy and in quarantine"
    ids, broken = {q.sample_id for q in found}, {MISSING, CUT} | play.must_be_left_out
    if absent := broken - ids:
        yield f"broken samples are not in quarantine: {sorted(absent)}"
    if healthy := ids - broken - play.may_be_left_out:
        yield f"healthy samples are in quarantine: {sorted(healthy)}"
    yield from of_epochs(store, run.run_id, shapes)


def of_epochs(store: Path, run_id: str, samples: set[int]) -> Iterator[str]:
    planned: dict[int, set[tuple[int, ...]]] = {}
    for plan in read_spool(store, StepPlan):
        if plan.run_id == run_id:
            planned.setdefault(plan.step, set()).add(tuple(sorted(plan.sample_index)))
    if missing := set(range(NUM_STEPS)) - planned.keys():
        yield f"steps {sorted(missing)} have no plan in the store"
        return
    if several := [step for step, found in planned.items() if len(found) > 1]:
        yield f"steps {several} were planned with different samples"
    per_epoch = -(-len(samples) // BATCH_SIZE)
    for epoch in range(NUM_STEPS // per_epoch):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        times = Counter(i for step in steps for found in planned[step] for i in found)
        if wrong := {i for i in samples | set(times) if times[i] != 1}:
            yield f"epoch {epoch}: samples {sorted(wrong)[:8]} are not trained exactly once"


def of_steps(run: RunDir) -> Iterator[str]:
    """Every step was seen by every rank, by none twice within a start."""
    seen = [o for o in read_spool(run.config().store, StepObservation) if o.run_id == run.run_id]
    twice = [key for key, n in Counter((o.attempt, o.step, o.rank) for o in seen).items() if n > 1]
    if twice:
        yield f"observations (attempt, step, rank) are there twice: {twice[:4]}"
    wanted = {(step, rank) for step in range(NUM_STEPS) for rank in range(run.plan().num_processes)}
    if missing := wanted - {(o.step, o.rank) for o in seen}:
        yield f"observations (step, rank) are missing: {sorted(missing)[:4]}"


def losses_of(run: RunDir) -> dict[int, list[float]]:
    """Of every step, over ranks and starts."""
    losses: dict[int, list[float]] = {}
    for o in read_spool(run.config().store, StepObservation):
        if o.run_id == run.run_id:
            losses.setdefault(o.step, []).append(o.loss)
    return losses


def of_losses(run: RunDir, expected: Mapping[int, float] | None) -> Iterator[str]:
    """Losses are those of a run that nothing happened to; where data were changed, at least numbers."""
    for step, found in sorted(losses_of(run).items()):
        if not all(map(math.isfinite, found)):
            yield f"step {step} has loss {found}"
        elif expected is not None and any(abs(x - expected[step]) > TOLERANCE * expected[step] for x in found):
            yield f"step {step} has loss {found}, undisturbed {expected[step]}"


def of_queue(run: RunDir) -> Iterator[str]:
    """Slurm has no job of the run any more."""
    done = subprocess.run(["squeue", "-h", "-o", "%i %T %k"], capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"squeue does not answer: {done.stderr.strip()}"
    for line in done.stdout.splitlines():
        if line.endswith(f" dflop:{run.run_id}") and " COMPLETING " not in line:
            yield f"left in the queue: {line}"


def of_jobs(run: RunDir) -> Iterator[str]:
    """Every job has ended, and every entry of the journal is in the store once."""
    records = Journal(run.path, run.run_id).records()
    for record in {record.job_id: record for record in records}.values():
        if not JobState(record.state).is_final:
            yield f"job {record.job_name} {record.job_id} is {record.state} in the journal"
    with Reader(run.config().store) as reader:
        rows = reader.records(JobRecord, where={"run_id": run.run_id})
        stored, noted = (Counter((r.job_id, r.state, r.observed_at_s) for r in found) for found in (rows, records))
    if stored != noted:
        yield f"the store has {stored.total()} rows of {noted.total()} entries of the journal"


def of_store(play: Play) -> Iterator[str]:
    """It equals what its files say, before and after it is made again from them; no lease and no rubbish is left."""
    store = play.stage.store
    for word in ("ingest", "verify", "rebuild", "verify"):
        done = play.dflop("store", word, "--store", str(store))
        if done.returncode:
            yield f"dflop store {word} ended with {done.returncode}: {done.stdout[-200:]} {done.stderr[-300:]}"
    claim = lease.newest_claim(store / lease.FOLDER)
    if claim is not None and not claim.is_released:
        yield f"the lease is held by process {claim.pid}"
    for path in store.rglob(f"{durable.TMP_PREFIX}*"):  # rubbish once it is old: no writer that lives has one so long
        os.utime(path, (time.time() - 2 * 86_400,) * 2, follow_symlinks=False)
    play.dflop("store", "gc", "--store", str(store))
    for path in store.rglob(f"{durable.TMP_PREFIX}*"):
        yield f"left in the store: {path.relative_to(store)}"
    shown = play.dflop("runs", "list", "--format", "json", "--runs", str(play.stage.runs))
    try:
        states = [json.loads(line)["state"] for line in shown.stdout.splitlines()]
    except ValueError:
        states = [shown.stdout[-200:] + shown.stderr[-300:]]
    if states != ["done"]:
        yield f"dflop runs list says {states}"
