"""How far a run has come, how fast it really is, and what starting its training again costs: out of its own rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.records import JobRecord, RankSpan
from dflop.store.reader import Reader

NUM_RECENT = 20
"""Steps that say how fast a run is."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands in its training."""

    attempt: int
    """The newest start of the job that has trained a step."""
    step: int
    """The newest that was observed."""
    steps: tuple[int, ...]
    """All that were, ascending."""
    time_ratio: float
    """Of measured to simulated seconds of a step, median of the latest: what a simulated gain has to be scaled with."""
    started_at_s: dict[int, float]
    """Per attempt, when its first step began to be like any other."""


def progress_of(reader: Reader, run_id: str, sync_s: float) -> Progress | None:
    """None before the first step is in the store; `sync_s` is what predictions of its steps leave out."""
    columns = ("attempt", "step", "step_s", "predicted_step_s", "observed_at_s")
    found = reader.arrays("step_rollup", columns, where={"run_id": run_id})
    if not len(found["step"]):
        return None
    order = np.lexsort((found["step"], found["attempt"]))
    attempt, step, step_s, predicted_s, at_s = (found[name][order] for name in columns)
    is_first = np.diff(attempt, prepend=attempt[0] - 1) != 0  # lazy initialisation, page faults
    usual = np.flatnonzero(~is_first & (predicted_s > 0))[-NUM_RECENT:]
    ratios = step_s[usual] / (predicted_s[usual] + sync_s)
    usual_s = float(np.median(step_s))
    return Progress(
        attempt=int(attempt[-1]),
        step=int(step[attempt == attempt[-1]].max()),
        steps=tuple(int(s) for s in np.unique(step)),
        time_ratio=float(np.median(ratios)) if len(ratios) else 1.0,
        started_at_s={int(a): float(t) - usual_s for a, t in zip(attempt[is_first], at_s[is_first], strict=True)},
    )


def restart_cost_s(reader: Reader, run_id: str, progress: Progress) -> float:
    """Seconds from submitting the training job to its first step, queue included, and of a checkpoint; NaN: not known.

    The median of this run's starts. A start that nobody submitted (Slurm's own requeue) does not count.
    """
    jobs = reader.records(JobRecord, where={"run_id": run_id})
    starts = _starts_s([j for j in jobs if j.job_key.split("/")[1:2] == ["train"]], progress)
    if not starts:
        return math.nan
    spans = reader.records(RankSpan, where={"run_id": run_id, "name": "checkpoint"})
    newest = max(((s.attempt, s.step) for s in spans), default=None)  # of it, the slowest rank
    return statistics.median(starts) + max((s.duration_s for s in spans if (s.attempt, s.step) == newest), default=0.0)


def _starts_s(jobs: Sequence[JobRecord], progress: Progress) -> list[float]:
    submitted: dict[str, float] = {}
    for job in jobs:
        submitted[job.job_id] = min(job.observed_at_s, submitted.get(job.job_id, math.inf))
    found, taken = [], set[str]()
    for _, started_s in sorted(progress.started_at_s.items()):
        earlier = [(at_s, job_id) for job_id, at_s in submitted.items() if at_s <= started_s]
        if earlier and (newest := max(earlier))[1] not in taken:
            taken.add(newest[1])
            found.append(started_s - newest[0])
    return found
