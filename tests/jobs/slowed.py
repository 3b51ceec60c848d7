"""The training job with a rank that is really slow.

It multiplies matrices at the end of every forward and backward until its thread has used up what is missing. On a CPU
only: that is where compute seconds are the thread's CPU seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from dflop.jobs import train
from dflop.train.engine import Engine

SLOW_RANK, FACTOR = "1", 1.8


def with_a_slow_rank(run_path: str, mode: str) -> dict[str, float]:
    """As `dflop.jobs.train:main`; the second rank takes 1.8 times its time."""
    if os.environ["RANK"] == SLOW_RANK:
        for name in ("_encode", "_decode"):
            setattr(Engine, name, _slow(getattr(Engine, name)))
        torch.autograd.backward = _slow(torch.autograd.backward)
    return train.main(run_path, mode)


def _slow(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Inside of what the engine times: neither what is received before nor what is sent after."""

    def slowed_compute(*args: Any) -> Any:
        start_s = time.thread_time()
        result = compute(*args)
        _burn((FACTOR - 1) * (time.thread_time() - start_s))
        return result

    return slowed_compute


def _burn(seconds: float) -> None:
    """Multiply matrices for so many CPU seconds of this thread."""
    end_s = time.thread_time() + seconds
    matrix = torch.full((96, 96), 1e-3)
    with torch.no_grad():
        while time.thread_time() < end_s:
            torch.mm(matrix, matrix)
