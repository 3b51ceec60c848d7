"""What has to hold of a run when it is over, whatever was done to it: one line for everything that does not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

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

CODES = {0, 1, 2, 3, 4, 5, 75, 130, 143, -9}
"""Exit codes of docs/operating.md, and what was killed."""
TOLERANCE = 1e-4
"""Relative, of losses: sums are made in another order when a batch is packed otherwise, for twelve steps."""
_ENDS_S = 20.0
_LEAVES_S = 30.0 + script.LOOKS_EVERY_S + script.ENDS_WITHIN_S
"""For a job to leave Slurm's queue: its script gives its tasks time, and Slurm its processes."""


def problems(play: Play, losses: Mapping[int, float] | None) -> list[str]:
    """Everything that is wrong with a run whose last command has ended well.

    `losses`, by step, are those of a run of the same seed that nothing happened to; None: there is no such run.
    """
    run = play.run
    if run is None:
        return ["there is no run directory"]
    is_altered = bool(play.must_be_left_out | play.may_be_left_out)
    on_slurm = run.config().cluster.backend == "slurm"
    return [
        *of_commands(play, _LEAVES_S if on_slurm else _ENDS_S),
        *of_directory(run),
        *of_samples(play, run),
        *of_steps(run, None if is_altered else losses),
        *(of_queue(run) if on_slurm else ()),
        *of_store(play, run),
        *(note for note in play.notes if note.startswith("WRONG")),
    ]


def of_commands(play: Play, limit_s: float) -> Iterator[str]:
    """Exit codes are documented, nobody was shown a traceback, no process is left."""
    for number, ended in enumerate(play.ended):
        if ended.code not in CODES:
            yield f"command {number} ended with {ended.code}, which is no documented exit code"
        if (at := ended.said.find("Traceback (most recent call last)")) >= 0:
            shown = " | ".join(line.strip() for line in ended.said[at:].splitlines())
            yield f"command {number} showed a traceback: {shown[:1500]}"
    deadline_s = time.monotonic() + limit_s
    while (left := play.processes()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    yield from (f"process {pid} is left: {line[:120]}" for pid, line in left.items())


def of_directory(run: RunDir) -> Iterator[str]:
    """There is one, which says that all is done, with a report and the last checkpoint; nobody drives it."""
    yield from (f"another run: {path.name}" for path in run.path.parent.glob("chaos-*") if path != run.path)
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
    for record in {record.job_id: record for record in Journal(run.path, run.run_id).records()}.values():
        if not JobState(record.state).is_final:
            yield f"job {record.job_name} {record.job_id} is {record.state} in the journal"


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
    yield from of_epochs(run, shapes)


def _of_run(run: RunDir, kind: type[Any]) -> list[Any]:
    return [record for record in read_spool(run.config().store, kind) if record.run_id == run.run_id]


def of_epochs(run: RunDir, samples: set[int]) -> Iterator[str]:
    planned = defaultdict[int, set[tuple[int, ...]]](set)
    for plan in _of_run(run, StepPlan):
        planned[plan.step].add(tuple(sorted(plan.sample_index)))
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


def of_steps(run: RunDir, losses: Mapping[int, float] | None) -> Iterator[str]:
    """Every step was seen by every rank, by none twice within a start, with a finite loss, or that of `losses`."""
    observations = _of_run(run, StepObservation)
    seen = Counter((o.attempt, o.step, o.rank) for o in observations)
    if twice := [key for key, n in seen.items() if n > 1]:
        yield f"observations (attempt, step, rank) are there twice: {twice[:4]}"
    wanted = {(step, rank) for step in range(NUM_STEPS) for rank in range(run.plan().num_processes)}
    if missing := wanted - {key[1:] for key in seen}:
        yield f"observations (step, rank) are missing: {sorted(missing)[:4]}"
    for o in observations:
        expected = losses[o.step] if losses is not None else o.loss
        if not math.isfinite(o.loss) or abs(o.loss - expected) > TOLERANCE * expected:
            yield f"step {o.step} has loss {o.loss} on rank {o.rank}, undisturbed {expected}"


def losses_of(run: RunDir) -> dict[int, float]:
    return {o.step: o.loss for o in _of_run(run, StepObservation)}


def of_queue(run: RunDir) -> Iterator[str]:
    done = subprocess.run(["squeue", "-h", "-o", "%i %T %k"], capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"squeue does not answer: {done.stderr.strip()}"
    for line in done.stdout.splitlines():
        if line.endswith(f" dflop:{run.run_id}") and " COMPLETING " not in line:
            yield f"left in the queue: {line}"


def of_store(play: Play, run: RunDir) -> Iterator[str]:
    """It has the journal and equals what its files say, also made again from them; no lease and no rubbish is left."""
    records = Journal(run.path, run.run_id).records()
    with Reader(play.store) as reader:
        rows = reader.records(JobRecord, where={"run_id": run.run_id})
        stored, noted = (Counter((r.job_id, r.state, r.observed_at_s) for r in found) for found in (rows, records))
    if stored != noted:
        yield f"the store has {stored.total()} rows of {noted.total()} entries of the journal"
    store = play.store
    for word in ("ingest", "verify", "rebuild", "verify", "gc"):
        if word == "gc":  # rubbish once it is old: no writer that lives has one so long
            for path in store.rglob(f"{durable.TMP_PREFIX}*"):
                os.utime(path, (time.time() - 2 * 86_400,) * 2, follow_symlinks=False)
        done = play.dflop("store", word, "--store", str(store))
        if done.returncode:
            yield f"dflop store {word} ended with {done.returncode}: {done.stdout[-200:]} {done.stderr[-300:]}"
    claim = lease.newest_claim(store / lease.FOLDER)
    if claim is not None and not claim.is_released:
        yield f"the lease is held by process {claim.pid}"
    yield from (f"left in the store: {path.relative_to(store)}" for path in store.rglob(f"{durable.TMP_PREFIX}*"))
    shown = play.dflop("runs", "list", "--format", "json", "--runs", str(play.runs))
    if shown.returncode or [json.loads(line)["state"] for line in shown.stdout.splitlines()] != ["done"]:
        yield f"dflop runs list says {shown.stdout[-200:]}{shown.stderr[-300:]}"
