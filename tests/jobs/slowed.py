"""Entry of ranks that are really slow at something: `python -m tests.jobs.slowed RUN_DIR SLOWNESS...`, of these:

shapes:MODULE:MIN:MAX:FACTOR   items of the module with MIN <= tokens < MAX take FACTOR times their time, forward and
                               backward, wherever they are; a packed microbatch takes more in proportion to their share
rank:RANK:FACTOR:STEP          everything takes FACTOR times its time on one rank, from a step on
stopped:RANK:SHARE:STEP        one rank is stopped for that share of the time, from a step on. Its own CPU clock does
                               not see that, only the clock on the wall does: what a throttled container looks like

The first two multiply matrices at the end of every forward and backward until the thread has used up what is missing.
On a CPU only: that is where compute seconds are the thread's CPU seconds.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from dflop.cost.model import CostModel, has_edge
from dflop.jobs import train
from dflop.jobs.rundir import open_run
from dflop.jobs.steps import TRAIN
from dflop.parallel.topology import Seat
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.train.engine import Engine
from dflop.train.loop import Trainer

PERIOD_S = 0.04
"""In which a stopped rank stops once."""
STOP_AND_GO = """
import os, select, signal, sys
rank, stop_s, go_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while os.getppid() == rank:
        os.kill(rank, signal.SIGSTOP)
        select.select([], [], [], stop_s)
        os.kill(rank, signal.SIGCONT)
        select.select([], [], [], go_s)
finally:
    os.kill(rank, signal.SIGCONT)
"""
Words = list[list[str]]
"""Of the command line, without the first of each, which is what they have in common."""


def burn(seconds: float) -> None:
    """Multiply matrices for so many CPU seconds of this thread."""
    end_s = time.thread_time() + seconds
    matrix = torch.full((96, 96), 1e-3)
    with torch.no_grad():
        while time.thread_time() < end_s:
            torch.mm(matrix, matrix)


class Slowed:
    """What every microbatch of one rank takes, as a multiple of its time."""

    def __init__(self, shapes: Words, ranks: Words, plan: Plan, seat: Seat, cost: CostModel) -> None:
        self._ranges = [(module, int(low), int(high), float(factor)) for module, low, high, factor in shapes]
        self._ranks = [(float(factor), int(step)) for rank, factor, step in ranks if int(rank) == seat.rank]
        self._plan, self._seat, self._cost = plan, seat, cost

    def multiples(self, step_plan: StepPlan, shapes: Sequence[SampleShape]) -> list[float]:
        """One per microbatch; `shapes` are those of the global batch."""
        rank = math.prod(factor for factor, step in self._ranks if step_plan.step >= step)
        return [rank * self._of_shapes(k, step_plan, shapes) for k in range(step_plan.num_microbatches)]

    def _of_shapes(self, k: int, step_plan: StepPlan, shapes: Sequence[SampleShape]) -> float:
        total_s = slowed_s = 0.0
        for part in self._seat.parts:
            work, of = step_plan.of(part.module), self._plan.module(part.module)
            depth, edge = of.layers_per_stage[self._seat.stage], has_edge(of.layers_per_stage, self._seat.stage)
            for item in work.owner[k][self._seat.dp_rank]:
                shape, number = shapes[work.item_sample[item]], work.item_rank_in_sample[item]
                tokens = shape.num_llm_tokens if part.module == LLM else shape.items[number].num_tokens
                squares = tokens**2 if part.module == LLM else shape.items[number].sum_sq_tokens
                load = (part.module, 1, tokens, squares)
                seconds = float(self._cost.item_seconds(*load, num_layers=depth, edge=edge, recompute=of.recompute))
                total_s += seconds
                ranges = [r for r in self._ranges if r[0] == part.module and r[1] <= tokens < r[2]]
                slowed_s += seconds * math.prod(factor for *_, factor in ranges)
        return slowed_s / total_s if total_s else 1.0


def stop_and_go(share: float) -> None:
    """Have another process stop this one, over and over, as long as this one lives."""
    times = [str(PERIOD_S * part) for part in (share, 1 - share)]
    subprocess.Popen([sys.executable, "-c", STOP_AND_GO, str(os.getpid()), *times])


def slow_down(shapes: Words, ranks: Words, stopped: Words, cost: CostModel) -> None:
    """Make the engine of this process slow."""
    step, forward, backward, since = Trainer._step, Engine._forward, Engine._backward, Engine._since

    def slowed_step(self: Any, number: int, ready: Any, *args: Any) -> Any:
        for rank, share, first in stopped:
            if (int(rank), int(first)) == (self._seat.rank, number):
                stop_and_go(float(share))
        step_plan = ready.message.step_plan
        batch = [self._source.shape(index) for index in step_plan.sample_index]
        slowed = Slowed(shapes, ranks, self._plan, self._seat, cost)
        self._engine.multiples = slowed.multiples(step_plan, batch)
        return step(self, number, ready, *args)

    def slowed_forward(self: Any, k: int, *args: Any) -> None:
        self.multiple = self.multiples[k]
        forward(self, k, *args)

    def slowed_backward(self: Any, k: int, *args: Any) -> None:
        self.multiple = self.multiples[k]
        backward(self, k, *args)

    def slowed_since(self: Any, start_s: float, compute_s: float) -> tuple[float, float]:
        """Called at the end of what is timed: after forward, and after backward."""
        burn((self.multiple - 1) * (time.thread_time() - compute_s))
        return since(self, start_s, compute_s)

    Trainer._step, Engine._forward = slowed_step, slowed_forward  # type: ignore[method-assign]  # a test double
    Engine._backward, Engine._since = slowed_backward, slowed_since  # type: ignore[method-assign]  # a test double


def main(run_path: str, *slowness: str) -> None:
    words = [text.split(":") for text in slowness]
    of_kind = [[rest for kind, *rest in words if kind == wanted] for wanted in ("shapes", "rank", "stopped")]
    slow_down(*of_kind, CostModel(open_run(run_path).cost_tables(), extrapolate=True))
    train.main(run_path, TRAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
