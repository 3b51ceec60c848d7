"""What balancing is worth in GPU-hours and money: the formulas of the calculator in reports.

The page computes the same with `templates/calculator.js`, from inputs that a reader may change; a browser test types
into the page and holds both equal. Costs that come once (profiling, whose tables later runs find in the store) are
weighed against what every step saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from dflop.records import JobRecord

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class WorthInputs:
    """What the calculator starts from; NaN where the run does not tell."""

    num_gpus: float
    """That are paid for."""
    num_steps: float
    """Optimizer steps of the training in question."""
    step_s: float
    """One of them, balanced."""
    speedup: float
    """Data-blind over balanced step time."""
    speedup_low: float
    speedup_high: float
    usd_per_gpu_hour: float
    once_gpu_hours: float
    """Spent before training, for balancing's sake."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What comes out; NaN where an input is missing, infinite where a gain never pays for what was spent."""

    gpu_hours: float
    """Of the training, balanced."""
    blind_gpu_hours: float
    saved_gpu_hours: float
    """Negative where data-blind is faster."""
    saved_low_gpu_hours: float
    saved_high_gpu_hours: float
    net_gpu_hours: float
    """Saved, less what was spent once."""
    saved_usd: float
    net_usd: float
    saved_frac: float
    """Of the data-blind training."""
    saved_s: float
    """By the clock."""
    break_even_steps: float
    """After which what was spent once has come back."""


def worth(given: WorthInputs) -> Worth:
    """What a training costs balanced and data-blind.

    Args:
        given: Any of them may be NaN, or negative, which counts as NaN.
    """
    num_gpus, num_steps, step_s, price, once = (
        value if value >= 0 else math.nan
        for value in (given.num_gpus, given.num_steps, given.step_s, given.usd_per_gpu_hour, given.once_gpu_hours)
    )
    speedup, low, high = (
        value if value > 0 else math.nan for value in (given.speedup, given.speedup_low, given.speedup_high)
    )
    gpu_hours_per_step = num_gpus * step_s / HOUR_S
    gpu_hours = gpu_hours_per_step * num_steps
    saved = gpu_hours * (speedup - 1)
    return Worth(
        gpu_hours=gpu_hours,
        blind_gpu_hours=gpu_hours * speedup,
        saved_gpu_hours=saved,
        saved_low_gpu_hours=gpu_hours * (low - 1),
        saved_high_gpu_hours=gpu_hours * (high - 1),
        net_gpu_hours=saved - once,
        saved_usd=saved * price,
        net_usd=(saved - once) * price,
        saved_frac=1 - 1 / speedup,
        saved_s=num_steps * step_s * (speedup - 1),
        break_even_steps=_break_even(once, gpu_hours_per_step * (speedup - 1)),
    )


def once_gpu_hours(jobs: Sequence[JobRecord]) -> float:
    """Hours of processes that a run's jobs took besides training and comparing; 0 where all was found in the store.

    Args:
        jobs: All states of a run's jobs.
    """
    hours = 0.0
    for job_id in {job.job_id for job in jobs}:
        states = sorted((job for job in jobs if job.job_id == job_id), key=lambda job: job.observed_at_s)
        began = next((job for job in states if job.state == "running"), None)
        if began is not None and not _is_of_training(began):
            hours += began.num_tasks * (states[-1].observed_at_s - began.observed_at_s) / HOUR_S
    return hours


def amount(value: float) -> str:
    """A number in three to four digits, as the page writes it: `0.0123`, `1.23`, `12.3`, `1,234`; `-` for NaN."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 4
    if size >= 1e15:  # a whole number anyhow
        return f"{value:,.0f}"
    # Halves go up as in a browser, and not to the even digit.
    exact = Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return f"{exact:,f}"


def duration(value_s: float) -> str:
    """Seconds as the page writes them: `45.0 s`, `1.50 h`, from two days on `2.08 days`; `-` for NaN."""
    if math.isnan(value_s):
        return "-"
    if value_s < 0:
        return f"-{duration(-value_s)}"
    if value_s < 60:
        return f"{amount(value_s)} s"
    hours = value_s / HOUR_S
    return f"{amount(hours)} h" if hours < 48 else f"{amount(hours / 24)} days"


def _break_even(once: float, saved_per_step: float) -> float:
    if math.isnan(once) or math.isnan(saved_per_step):
        return math.nan
    if once == 0:
        return 0.0
    return once / saved_per_step if saved_per_step > 0 else math.inf


def _is_of_training(job: JobRecord) -> bool:
    """By its key, `<run>/train` or `<run>/compare`."""
    return job.job_key.split("/")[1:2] in (["train"], ["compare"])
