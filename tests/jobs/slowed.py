"""Entry of ranks that are really slow at something: `python -m tests.jobs.slowed RUN_DIR SLOWNESS...`, of this form:

shapes:MODULE:MIN:MAX:FACTOR   items of the module with MIN <= tokens < MAX take FACTOR times their time, forward and
                               backward, wherever they are; a packed microbatch takes more in proportion to their share
rank:NUMBER:FACTOR             everything takes this rank FACTOR times its time

They multiply matrices at the end of every forward and backward until the thread has used up what is missing. On a CPU
only: that is where compute seconds are the thread's CPU seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflop.cost.model import CostModel, has_edge
from dflop.jobs import train
from dflop.parallel.topology import Seat
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.run.batches import TRAIN
from dflop.run.directory import open_run
from dflop.train.engine import Engine
from dflop.train.loop import Trainer


def burn(seconds: float) -> None:
    """Multiply matrices for so many CPU seconds of this thread."""
    end_s = time.thread_time() + seconds
    matrix = torch.full((96, 96), 1e-3)
    with torch.no_grad():
        while time.thread_time() < end_s:
            torch.mm(matrix, matrix)


class Slowed:
    """What every microbatch of one rank takes, as a multiple of its time."""

    def __init__(self, slowness: Sequence[str], plan: Plan, seat: Seat, cost: CostModel) -> None:
        words = [text.split(":") for text in slowness]
        self._factor = math.prod(float(w[2]) for w in words if w[0] == "rank" and int(w[1]) == seat.rank)
        self._ranges = [(w[1], int(w[2]), int(w[3]), float(w[4])) for w in words if w[0] == "shapes"]
        self._plan, self._seat, self._cost = plan, seat, cost

    def multiples(self, step_plan: StepPlan, shapes: Sequence[SampleShape]) -> list[float]:
        """One per microbatch; `shapes` are those of the global batch."""
        return [self._of(k, step_plan, shapes) for k in range(step_plan.num_microbatches)]

    def _of(self, k: int, step_plan: StepPlan, shapes: Sequence[SampleShape]) -> float:
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
        return self._factor * (slowed_s / total_s if total_s else 1.0)


def slow_down(slowness: Sequence[str], cost: CostModel) -> None:
    """Make the engine of this process slow."""
    step, multiples, now = Trainer._step, list[float](), [1.0]

    def slowed_step(self: Any, number: int, ready: Any, *args: Any) -> Any:
        step_plan = ready.message.step_plan
        batch = [self._source.shape(index) for index in step_plan.sample_index]
        multiples[:] = Slowed(slowness, self._plan, self._seat, cost).multiples(step_plan, batch)
        return step(self, number, ready, *args)

    def of_microbatch(visit: Callable[..., None]) -> Callable[..., None]:
        def slowed_visit(self: Any, k: int, *args: Any) -> None:
            now[0] = multiples[k]
            visit(self, k, *args)

        return slowed_visit

    def slow(compute: Callable[..., Any]) -> Callable[..., Any]:
        """Inside of what the engine times: neither what is received before nor what is sent after."""

        def slowed_compute(*args: Any) -> Any:
            start_s = time.thread_time()
            result = compute(*args)
            burn((now[0] - 1) * (time.thread_time() - start_s))
            return result

        return slowed_compute

    Trainer._step = slowed_step  # type: ignore[method-assign]  # a test double
    for name in ("_forward", "_backward"):
        setattr(Engine, name, of_microbatch(getattr(Engine, name)))
    for name in ("_encode", "_decode"):
        setattr(Engine, name, slow(getattr(Engine, name)))
    torch.autograd.backward = slow(torch.autograd.backward)


def main(run_path: str, *slowness: str) -> None:
    slow_down(slowness, CostModel(open_run(run_path).cost_tables(), extrapolate=True))
    train.main(run_path, TRAIN)


def with_a_slow_rank(run_path: str, mode: str) -> dict[str, float]:
    """As `dflop.jobs.train:main`; the second rank takes 1.8 times its time."""
    slow_down(["rank:1:1.8"], CostModel(open_run(run_path).cost_tables(), extrapolate=True))
    return train.main(run_path, mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
