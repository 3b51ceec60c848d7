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

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SlowShapes:
    """Items of one module, by size, that take longer than others of their size should."""

    module: str
    min_tokens: int
    max_tokens: int
    factor: float

    def holds(self, num_tokens: int) -> bool:
        return self.min_tokens <= num_tokens < self.max_tokens


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer for everything."""

    rank: int
    factor: float
    first_step: int


@dataclass(frozen=True)
class StoppedRank:
    """A rank that is stopped for a share of the time."""

    rank: int
    share: float
    first_step: int


Slowness = SlowShapes | SlowRank | StoppedRank


def parse(text: str) -> Slowness:
    """A slowness as the command line names it."""
    kind, *rest = text.split(":")
    if kind == "shapes":
        return SlowShapes(rest[0], int(rest[1]), int(rest[2]), float(rest[3]))
    return {"rank": SlowRank, "stopped": StoppedRank}[kind](int(rest[0]), float(rest[1]), int(rest[2]))


def burn(seconds: float) -> None:
    """Multiply matrices for so many CPU seconds of this thread."""
    end_s = time.thread_time() + seconds
    matrix = torch.full((96, 96), 1e-3)
    with torch.no_grad():
        while time.thread_time() < end_s:
            torch.mm(matrix, matrix)


class Slowed:
    """What every microbatch of one rank takes, as a multiple of its time."""

    def __init__(self, slowness: Sequence[Slowness], plan: Plan, seat: Seat, cost: CostModel) -> None:
        self._slowness, self._plan, self._seat, self._cost = slowness, plan, seat, cost

    def multiples(self, step_plan: StepPlan, shapes: Sequence[SampleShape]) -> list[float]:
        """One per microbatch; `shapes` are those of the global batch."""
        rank = 1.0
        for slow in self._slowness:
            if isinstance(slow, SlowRank) and slow.rank == self._seat.rank and step_plan.step >= slow.first_step:
                rank *= slow.factor
        return [rank * self._of_shapes(k, step_plan, shapes) for k in range(step_plan.num_microbatches)]

    def _of_shapes(self, k: int, step_plan: StepPlan, shapes: Sequence[SampleShape]) -> float:
        total_s = slowed_s = 0.0
        for part in self._seat.parts:
            work, of = step_plan.of(part.module), self._plan.module(part.module)
            for item in work.owner[k][self._seat.dp_rank]:
                shape, number = shapes[work.item_sample[item]], work.item_rank_in_sample[item]
                tokens = shape.num_llm_tokens if part.module == LLM else shape.items[number].num_tokens
                squares = tokens**2 if part.module == LLM else shape.items[number].sum_sq_tokens
                seconds = float(
                    self._cost.item_seconds(
                        part.module, 1, tokens, squares, num_layers=of.layers_per_stage[self._seat.stage],
                        edge=has_edge(of.layers_per_stage, self._seat.stage), recompute=of.recompute,
                    )
                )  # fmt: skip
                total_s += seconds
                for slow in self._slowness:
                    if isinstance(slow, SlowShapes) and slow.module == part.module and slow.holds(tokens):
                        seconds *= slow.factor
                slowed_s += seconds
        return slowed_s / total_s if total_s else 1.0


def stop_and_go(slow: StoppedRank) -> None:
    """Have another process stop this one, over and over, as long as this one lives."""
    times = [str(PERIOD_S * share) for share in (slow.share, 1 - slow.share)]
    subprocess.Popen([sys.executable, "-c", STOP_AND_GO, str(os.getpid()), *times])


def slow_down(slowness: Sequence[Slowness], cost: CostModel) -> None:
    """Make the engine of this process slow."""
    step, forward, backward, since = Trainer._step, Engine._forward, Engine._backward, Engine._since

    def slowed_step(self: Any, number: int, ready: Any, *args: Any) -> Any:
        for slow in slowness:
            if isinstance(slow, StoppedRank) and (slow.rank, slow.first_step) == (self._seat.rank, number):
                stop_and_go(slow)
        step_plan = ready.message.step_plan
        shapes = [self._source.shape(index) for index in step_plan.sample_index]
        slowed = Slowed(slowness, self._plan, self._seat, cost)
        self._engine.multiples = slowed.multiples(step_plan, shapes)
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
    slow_down([parse(text) for text in slowness], CostModel(open_run(run_path).cost_tables(), extrapolate=True))
    train.main(run_path, TRAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
