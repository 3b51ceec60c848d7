"""The training job with steps that take longer, for tests in which something has to happen midway."""

from __future__ import annotations

import time

from dflop.jobs import train
from dflop.records import StepObservation

STEP_S = 0.5


def main(run_path: str, mode: str) -> dict[str, float]:
    """As `dflop.jobs.train:main`; every rank rests behind every step."""
    observed = train._Rank._observed

    def rested(rank: train._Rank, seen: StepObservation) -> None:
        observed(rank, seen)
        time.sleep(STEP_S)

    train._Rank._observed = rested  # type: ignore[method-assign]  # no hook of its own is worth having for tests
    return train.main(run_path, mode)
