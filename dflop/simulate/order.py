"""What every stage runs when, and what it waits for. Nothing else says so.

The engine runs these actions, the simulator times them, memory is what is in flight between them, and arrows of a
trace are its links.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dflop.records import LLM, Plan

Phase = Literal["F", "B"]
Stage = tuple[str, int]
"""(pipe, stage)."""


class Action(NamedTuple):
    """Forward (`F`) or backward (`B`) of one microbatch."""

    phase: Phase
    microbatch: int


@functools.lru_cache(maxsize=4096)
def actions(num_microbatches: int, num_stages_after: int) -> tuple[Action, ...]:
    """What a stage runs that has `num_stages_after` stages between it and the loss: 1F1B.

    Warm-up runs `min(num_microbatches, num_stages_after)` forwards, the steady state alternates one forward and one
    backward, and the rest are backwards (PipeDream-Flush, arXiv 2006.09503).
    """
    forwards, backwards = _each("F", num_microbatches), _each("B", num_microbatches)
    warm = min(num_microbatches, num_stages_after)
    steady = itertools.chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    return (*forwards[:warm], *steady, *backwards[num_microbatches - warm :])


@functools.lru_cache(maxsize=256)
def _each(phase: Phase, num_microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(phase, k) for k in range(num_microbatches))


def returned(order: Sequence[Action]) -> dict[int, int]:
    """By microbatch, the last one whose backward pass a stage has done before the forward pass; -1: none."""
    found, last = dict[int, int](), -1
    for phase, microbatch in order:
        if phase == "F":
            found[microbatch] = last
        else:
            last = max(last, microbatch)
    return found


def in_flight(num_microbatches: int, num_stages_after: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Most microbatches that a stage holds at once in training; 0 for a stage that is none (-1 stages after it)."""
    after = np.asarray(num_stages_after, dtype=np.int64)
    return _most_in_flight(num_microbatches, int(after.max(initial=0)))[after + 1]


@functools.lru_cache(maxsize=4096)
def _most_in_flight(num_microbatches: int, most_after: int) -> npt.NDArray[np.int64]:
    """`[most_after + 2]`, by stages after, -1 first."""
    return np.array([0, *(_most_held(num_microbatches, after) for after in range(most_after + 1))], dtype=np.int64)


@functools.lru_cache(maxsize=4096)
def _most_held(num_microbatches: int, num_stages_after: int) -> int:
    each = itertools.accumulate(1 if a.phase == "F" else -1 for a in actions(num_microbatches, num_stages_after))
    return max(each, default=0)


def links(depths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(stage, stage that takes what it makes), numbered over pipes of these depths, of which the last is the LLM's.

    A forward pass waits for those before it, a backward pass for those behind it, each on the same microbatch.
    """
    starts = [0, *itertools.accumulate(depths)]
    inside = [pair for start, end in itertools.pairwise(starts) for pair in itertools.pairwise(range(start, end))]
    return (*inside, *((end - 1, starts[-2]) for end in starts[1:-1]))


def stage_links(plan: Plan) -> tuple[tuple[Stage, Stage], ...]:
    """`links` of a plan's pipes."""
    pipes = sorted(plan.pipes, key=lambda pipe: pipe.module == LLM)
    stages = [(pipe.module, stage) for pipe in pipes for stage in range(pipe.parallel.pp)]
    return tuple((stages[a], stages[b]) for a, b in links([pipe.parallel.pp for pipe in pipes]))


def num_stages_after(plan: Plan, module: str, stage: int) -> int:
    """Stages between this one and the loss."""
    own = plan.module(module).parallel.pp - 1 - stage
    return own if module == LLM else own + plan.module(LLM).parallel.pp
