"""How runs and their jobs stand, from run directories alone: no store, no cluster is asked."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError, DflopError, did_you_mean
from dflop.launch import JobState, Noted, log_paths
from dflop.launch.tail import last_lines
from dflop.report.tables import layout_text
from dflop.run import lifecycle
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.run.driver_lock import driver_of
from dflop.run.queue import jobs_of
from dflop.train.manifest import VALIDATED, read_latest

RUN_COLUMNS = ("run", "state", "step", "num_steps", "val_loss", "best_val_loss", "jobs", "plan", "begun", "driver")
JOB_COLUMNS = ("job", "id", "state", "reason", "attempt", "submitted", "took_s", "log")
SCHEDULER = "scheduler"
"""Name for the log of what runs beside rank 0."""
STEP_LINE = re.compile(r"step \d+  (\d+)/(\d+) done")
"""What a training job says of each step."""
VALIDATION_LINE = re.compile(r"validation after step \d+: loss (\d+\.\d+) ")
"""What it says of each validation."""
MAX_LINES = 1000
"""Last lines of a log that the last step and the last validation are looked for in."""


def run_rows(runs: Sequence[RunDir], *, everything: bool = False) -> list[tuple[Any, ...]]:
    """Rows of `RUN_COLUMNS`; `everything`: also profiles or plans alone that have ended."""
    # A driver that was killed while it profiled may have left jobs, too.
    states = ((run, run.state()) for run in runs)
    found = [r for r, s in states if everything or s.get("trains", True) or s.get("state") == lifecycle.RUNNING]
    return [_facts_or_problem(run) for run in found]


def _facts_or_problem(run: RunDir) -> tuple[Any, ...]:
    """One damaged run hides no other."""
    try:
        return tuple(run_facts(run).values())
    except DflopError as error:
        problem = f"damaged: {error.what}"
    except OSError as error:  # it is being removed
        problem = f"damaged: {error.strerror}"
    return run.run_id, problem, *[None] * (len(RUN_COLUMNS) - 2)


def run_facts(run: RunDir) -> dict[str, Any]:
    """How one run stands, by the names of `RUN_COLUMNS`."""
    state, driver = run.state(), driver_of(run)
    word = str(state.get("state", lifecycle.READY))
    live = [job for job in jobs_of(run) if not job.state.is_final]
    if word == lifecycle.RUNNING and driver is None:
        word = "abandoned"  # its driver was killed; taken up again it goes on, and adopts its jobs
    return {
        "run": run.run_id,
        "state": word,
        "step": steps_done(run),
        "num_steps": state.get("num_steps") or run.config().train.num_steps,
        **dict(zip(("val_loss", "best_val_loss"), validation_losses(run), strict=True)),
        "jobs": ", ".join(f"{job.name} {job.state} ({job.handle.backend} {job.handle.job_id})" for job in live),
        "plan": layout_text(run.plan()) if run.has_plan() else "",
        "begun": _clock(run.config_file.stat().st_mtime),
        "driver": str(driver or ""),
    }


def job_rows(run: RunDir) -> list[tuple[Any, ...]]:
    """Rows of `JOB_COLUMNS`."""
    return [
        (
            job.name, job.handle.job_id, job.last.state, job.last.reason, job.last.attempt,
            _clock(job.handle.submitted_at_s), job.took_s, str(log_paths(job.handle).stderr),
        )
        for job in jobs_of(run)
    ]  # fmt: skip


def steps_done(run: RunDir) -> int:
    """Optimizer steps behind a run: by its checkpoints, or by the log of the job that runs, which knows more."""
    found = (_said(job, STEP_LINE)[-1:] for job in _training_jobs(run) if job.state is JobState.RUNNING)
    return max(run.next_step(), *map(int, chain(*found)), 0)


def validation_losses(run: RunDir) -> tuple[float | None, float | None]:
    """(loss of the last validation, lowest of all) by the logs of training jobs and the newest checkpoint."""
    losses = [float(text) for job in _training_jobs(run) for text in _said(job, VALIDATION_LINE)]
    kept = (read_latest(run.checkpoints) or {}).get(VALIDATED)
    lowest = kept[:1] if isinstance(kept, list) else []
    known = [loss for loss in (*losses, *lowest) if isinstance(loss, float) and math.isfinite(loss)]
    return losses[-1] if losses else None, round(min(known), 4) if known else None


def _training_jobs(run: RunDir) -> list[Noted]:
    return [job for job in jobs_of(run) if job.name == TRAIN]


def _said(job: Noted, pattern: re.Pattern[str]) -> list[str]:
    """First group of the lines of a job's log that match, in order."""
    text, _ = last_lines(log_paths(job.handle).stderr, MAX_LINES)
    return [match[1] for line in text.splitlines() if (match := pattern.match(line))]


def log_files(run: RunDir, job: str, rank: int) -> tuple[Noted | None, list[Path]]:
    """The job that is meant by its name, its id, `scheduler`, or (empty) as the last one, and its log files.

    Raises:
        ConfigError: there is no such job, or none at all.
    """
    views = jobs_of(run)
    beside = sorted((run.path / "log").glob(f"{SCHEDULER}-*.log"), key=lambda path: path.stat().st_mtime)
    if job == SCHEDULER and beside:
        return None, beside[-1:]
    found = [view for view in views if job in ("", view.name, view.handle.job_id)]
    if not found:
        names = [*dict.fromkeys(view.name for view in views), *([SCHEDULER] if beside else [])]
        raise ConfigError(
            f"run `{run.run_id}` has no job `{job}`" if names else f"run `{run.run_id}` has submitted no job yet",
            where=str(run.path / "jobs.jsonl"),
            hint=did_you_mean(job, names) if names else "",
        )
    view = found[-1]
    if not 0 <= rank < view.handle.num_tasks:
        raise ConfigError(f"job `{view.name}` has no rank {rank}", hint=f"0 to {view.handle.num_tasks - 1}")
    return view, list(log_paths(view.handle, rank))


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
