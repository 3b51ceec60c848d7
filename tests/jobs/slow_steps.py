"""The training job with steps that take longer, for tests in which something has to happen midway."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from dflop.launch import JobSpec
from dflop.records import StepObservation

STEP_S = 0.5


def with_slow_steps(train_job: Callable[..., JobSpec]) -> Callable[..., JobSpec]:
    """To put in the place of `dflop.steps.submit.train_job`: its jobs come here."""

    def train_job_of_slow_steps(*args: Any) -> JobSpec:
        return dataclasses.replace(train_job(*args), entry=f"{__name__}:main")

    return train_job_of_slow_steps


def main(run_path: str, mode: str) -> dict[str, float]:
    """As `dflop.jobs.train:main`; every rank rests behind every step."""
    from dflop.jobs import train
    from dflop.jobs.rank import Rank  # torch, which whoever submits the job does not need

    observed = Rank._observed

    def rested(rank: Rank, seen: StepObservation) -> None:
        observed(rank, seen)
        time.sleep(STEP_S)

    Rank._observed = rested  # type: ignore[method-assign]  # no hook of its own is worth having for tests
    return train.main(run_path, mode)
