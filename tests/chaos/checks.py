"""What has to hold of a run when it is over, whatever was done to it: one line for everything that does not."""

import math
import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflop import files
from dflop.launch import Journal, executor
from dflop.launch.job import JobState
from dflop.records import JobRecord, QuarantinedSample, SampleShape, StepObservation, StepPlan
from dflop.run.directory import RunDir
from dflop.run.driver_lock import driver_of
from dflop.store import lease
from dflop.store.reader import Reader
from dflop.train.manifest import read_latest
from tests.chaos.play import Play
from tests.chaos.stage import BATCH_SIZE, CUT, MISSING, NUM_STEPS
from tests.store.spooled import read_spool

CODES = {0, 1, 2, 3, 4, 5, 75, 130, 143, -9}
"""Exit codes of docs/operating.md, and what was killed."""
TOLERANCE = 1e-4
"""Relative, of losses: sums are made in another order when a batch is packed otherwise, for twelve steps."""
_LEAVES_S = 30.0 + executor.LOOKS_EVERY_S + executor.ENDS_WITHIN_S
"""For a job to leave Slurm's queue: its script gives its tasks time, and Slurm its processes."""


def problems(play: Play, losses: Mapping[int, float] | None) -> list[str]:
    """Everything that is wrong with a run whose last command has ended well.

    `losses`, by step, are those of a run of the same seed that nothing happened to; None: there is no such run.
    """
    run = play.run
    if run is None:
        return ["there is no run directory"]
    is_altered = bool(play.must_be_left_out | play.may_be_left_out)
    return [
        *_of_commands(play),
        *_of_directory(run),
        *_of_samples(play, run),
        *_of_steps(run, None if is_altered else losses),
        *_of_store(play, run),
        *(note for note in play.notes if note.startswith("WRONG")),
    ]


def losses_of(path: Path) -> dict[int, float]:
    """Those of a run directory, by step."""
    return {o.step: o.loss for o in _records(RunDir(path), StepObservation)}


def _records(run: RunDir, kind: type[Any]) -> list[Any]:
    return [record for record in read_spool(run.config().store, kind) if record.run_id == run.run_id]


def _of_commands(play: Play) -> Iterator[str]:
    """Exit codes are documented, nobody was shown a traceback, no process is left."""
    for number, ended in enumerate(play.ended):
        if ended.code not in CODES:
            yield f"command {number} ended with {ended.code}, which is no documented exit code"
        _, traceback, rest = ended.said.partition("Traceback (most recent call last)")
        if traceback:
            yield f"command {number} showed a traceback: {rest[:1500]}"
    deadline_s = time.monotonic() + _LEAVES_S
    while (left := play.processes()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    yield from (f"process {pid} is left: {line[:120]}" for pid, line in left.items())


def _of_directory(run: RunDir) -> Iterator[str]:
    """There is one, which says that all is done, with a report and the last checkpoint; nobody works on it."""
    latest = read_latest(run.checkpoints) or {}
    jobs = {record.job_id: JobState(record.state) for record in Journal(run.path, run.run_id).records()}
    facts = {
        "run directories": (len(list(run.path.parent.glob("chaos-*"))), 1),
        "state": (run.state().get("state"), "done"),
        "report": (run.report_file.is_file(), True),
        "step of the newest checkpoint": (latest.get("next_step"), NUM_STEPS),
        "driver": (driver_of(run), None),
        "left in checkpoints": (list(run.checkpoints.glob(f"{files.TMP_PREFIX}*")), []),
        "jobs that have not ended": ([job for job, state in jobs.items() if not state.is_final], []),
    }
    yield from (f"{what}: {found}, not {wanted}" for what, (found, wanted) in facts.items() if found != wanted)
    if run.config().cluster.backend == "slurm":
        queue = subprocess.run(["squeue", "-h", "-o", "%i %T %k"], capture_output=True, text=True, check=True).stdout
        for line in queue.splitlines():
            if line.endswith(f" dflop:{run.run_id}") and " COMPLETING " not in line:
                yield f"left in the queue: {line}"


def _of_samples(play: Play, run: RunDir) -> Iterator[str]:
    """Every row is trained once in every epoch, or in quarantine; and none that need not be is there."""
    store, key = run.config().store, run.profile_key()
    shapes = {s.sample_index for s in run.shapes()}
    stored = {s.sample_index for s in read_spool(store, SampleShape) if s.profile_key == key}
    if stored != shapes:
        yield f"the run trains on {len(shapes)} samples, its profile has {len(stored)}"
    found = [q for q in read_spool(store, QuarantinedSample) if q.profile_key == key]
    ids, broken = {q.sample_id for q in found}, {MISSING, CUT} | play.must_be_left_out
    for what, samples in (
        ("both healthy and in quarantine", {q.sample_index for q in found if q.phase == "profile"} & shapes),
        ("broken and not in quarantine", broken - ids),
        ("healthy and in quarantine", ids - broken - play.may_be_left_out),
    ):
        if samples:
            yield f"samples are {what}: {sorted(samples)}"
    planned = defaultdict[int, set[tuple[int, ...]]](set)
    for plan in _records(run, StepPlan):
        planned[plan.step].add(tuple(sorted(plan.sample_index)))
    if wrong := [step for step in range(NUM_STEPS) if len(planned[step]) != 1]:
        yield f"steps {wrong} have no plan in the store, or several with different samples"
    per_epoch = -(-len(shapes) // BATCH_SIZE)
    for epoch in range(NUM_STEPS // per_epoch):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        times = Counter(i for step in steps for chosen in planned[step] for i in chosen)
        if times != Counter(shapes):
            yield f"epoch {epoch}: samples are not trained exactly once: {times.most_common(3)} of {len(times)}"


def _of_steps(run: RunDir, losses: Mapping[int, float] | None) -> Iterator[str]:
    """Every step was seen by every rank, by none twice within a start, with a finite loss, or that of `losses`."""
    observations = _records(run, StepObservation)
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


def _of_store(play: Play, run: RunDir) -> Iterator[str]:
    """It has the journal and equals what its files say, also made again from them; no lease and no rubbish is left."""
    store = play.store
    with Reader(store) as reader:
        rows = reader.records(JobRecord, where={"run_id": run.run_id})
    noted = Journal(run.path, run.run_id).records()
    stored, written = (Counter((r.job_id, r.state, r.observed_at_s) for r in found) for found in (rows, noted))
    if stored != written:
        yield f"the store has {len(rows)} rows of {len(noted)} entries of the journal"
    for path in store.rglob(f"{files.TMP_PREFIX}*"):  # rubbish once it is old: no writer that lives has one so long
        os.utime(path, (time.time() - 2 * 86_400,) * 2, follow_symlinks=False)
    for word in ("ingest", "verify", "rebuild", "verify", "gc"):
        done = play.dflop("store", word, "--store", str(store))
        if done.returncode:
            yield f"dflop store {word} ended with {done.returncode}: {done.stdout[-200:]} {done.stderr[-300:]}"
    claim = lease.newest_claim(store / lease.FOLDER)
    if claim is not None and not claim.is_released:
        yield f"the lease is held by process {claim.pid}"
    yield from (f"left in the store: {path.relative_to(store)}" for path in store.rglob(f"{files.TMP_PREFIX}*"))
