"""What balancing is worth in hours of processes: a training balanced and data-blind, and what was spent once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflop import units
from dflop.records import JobRecord
from dflop.report.summary import RunSummary
from dflop.report.tables import Table

HOUR_S = 3600.0


def worth_table(summary: RunSummary) -> Table:
    """Hours over the steps of the whole training, at the measured speed-up, or the planned one without any."""
    num_steps = summary.details.num_steps_planned or len(summary.steps)
    hours = summary.plan.num_processes * num_steps * summary.step_s / HOUR_S
    once = once_hours(summary.details.jobs)
    if summary.comparison is not None and summary.comparison.measured.num_batches:
        found = summary.comparison.measured
        speedup, low, high, how = found.mean, found.low, found.high, "measured"
    else:
        speedup, low, high, how = summary.plan.planned_speedup, math.nan, math.nan, "simulated when planning"
    saved = hours * (speedup - 1)
    per_step = saved / num_steps if num_steps else math.nan
    interval = (
        "" if math.isnan(low) else f" (95 % interval {_hours(hours * (low - 1))} to {_hours(hours * (high - 1))})"
    )
    rows = (
        ("training, balanced", _hours(hours)),
        ("training, data-blind", _hours(hours * speedup)),
        ("saved", _hours(saved) + interval),
        ("spent once, on profiling and planning", _hours(once)),
        ("back after", _back_after(once, per_step)),
    )
    what = "processes" if summary.num_cores is not None else "GPUs"
    return Table(
        "What it is worth",
        ("of this training", f"hours of {what}"),
        rows if not math.isnan(saved) else (),
        frozenset({"of this training"}),
        f"{units.count(num_steps)} steps on {summary.plan.num_processes} {what}, each step as long as the median one; "
        f"speed-up {how}. Spent once: this run's jobs besides training and comparing; 0 where the store had it all. "
        "Other steps, clusters and prices: dflop compare CONFIG --num-steps N --usd-per-gpu-hour P",
        empty="No step was measured, so nothing is reckoned.",
    )


def once_hours(jobs: Sequence[JobRecord]) -> float:
    """Hours of processes that a run's jobs took besides training and comparing; 0 where all was found in the store.

    Args:
        jobs: All states of a run's jobs.
    """
    hours = 0.0
    for job_id in {job.job_id for job in jobs}:
        states = sorted((job for job in jobs if job.job_id == job_id), key=lambda job: job.observed_at_s)
        began = next((job for job in states if job.state == "running"), None)
        # The key of a job of training is `<run>/train` or `<run>/compare`.
        if began is not None and began.job_key.split("/")[1:2] not in (["train"], ["compare"]):
            hours += began.num_tasks * (states[-1].observed_at_s - began.observed_at_s) / HOUR_S
    return hours


def _back_after(once: float, saved_per_step: float) -> str:
    if once == 0:
        return "0 steps"
    return f"{units.count(math.ceil(once / saved_per_step))} steps" if saved_per_step > 0 else "never"


def _hours(value: float) -> str:
    return f"{value:,.4f}" if abs(value) < 1 else f"{value:,.1f}"
