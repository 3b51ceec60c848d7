"""What balancing is worth in hours of processes: a training balanced and data-blind, and what was spent once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dflop import units
from dflop.records import JobRecord
from dflop.records.speedup import NOT_COMPARED
from dflop.report.summary import RunSummary
from dflop.report.tables import Table

HOUR_S = 3600.0


def gpu_hours(step_s: float, *, num_steps: int, num_gpus: int) -> float:
    """Hours of all GPUs, or of processes without one, over steps of one length."""
    return num_steps * num_gpus * step_s / HOUR_S


def worth_table(summary: RunSummary) -> Table:
    """Hours over the steps of the whole training, at the measured speed-up, or the planned one without any."""
    num_steps = summary.num_steps_planned or len(summary.steps)
    step_hours = gpu_hours(summary.step_s, num_steps=1, num_gpus=summary.plan.num_processes)
    hours = step_hours * num_steps
    once, how = once_hours(summary.jobs), "measured"
    found = summary.comparison.measured if summary.comparison else NOT_COMPARED
    if not found.num_batches:
        found, how = replace(NOT_COMPARED, mean=summary.plan.planned_speedup), "simulated when planning"
    saved, low, high = (hours * (speedup - 1) for speedup in (found.mean, found.low, found.high))
    interval = f" (95 % interval {_hours(low)} to {_hours(high)})" if found.has_interval else ""
    back_after = "never"
    if once == 0:
        back_after = "0 steps"
    elif num_steps and saved > 0:
        back_after = f"{units.count(math.ceil(once / (saved / num_steps)))} steps"
    rows = {
        "training, balanced": (hours, ""),
        "training, arrival order": (hours * found.mean, ""),
        "an epoch, balanced": (step_hours * summary.epoch_steps, ""),
        "saved": (saved, interval),
        "one-time cost of profiling and planning": (once, ""),
    }
    what = "processes" if summary.num_cores is not None else "GPUs"
    price, known = summary.usd_per_gpu_hour, {name: of for name, of in rows.items() if not math.isnan(of[0])}
    cells = [(name, _hours(h) + more, *[f"{h * price:,.2f}"] * (price > 0)) for name, (h, more) in known.items()]
    return Table(
        "Savings",
        ("of this training", f"hours of {what}", *["USD"] * (price > 0)),
        (*cells, ("break-even after", back_after, *[""] * (price > 0))) if not math.isnan(saved) else (),
        frozenset({"of this training"}),
        f"{units.count(num_steps)} steps on {summary.plan.num_processes} {what}, at the median step time; speedup "
        f"{how}. One-time cost: this run's jobs other than training and comparing; 0 where the store had all "
        "profiles. With a price: dflop report RUN --usd-per-gpu-hour P. For other step counts and clusters: dflop "
        "compare CONFIG --num-steps N",
        empty="No step was measured.",
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


def _hours(value: float) -> str:
    return f"{value:,.4f}" if abs(value) < 1 else f"{value:,.1f}"
