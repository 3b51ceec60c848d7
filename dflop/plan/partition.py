"""A chain of work cut into stages: the slowest stage as fast as possible, then all of them as even as possible.

The linear partition problem, exactly, by dynamic programming over cut positions: two passes of S N^2 steps for N units
and S stages, each step an array call.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from dflop.cost.model import Floats

Cuts = tuple[int, ...]
"""`cuts[stage]` = first unit of a stage, and at the end the number of units."""
ROUNDING = 1.0 + 1e-12


def best_cuts(seconds: Floats, num_stages: int, allowed: npt.NDArray[np.bool_] | None = None) -> Cuts | None:
    """Cuts of units into contiguous stages of at least one unit each.

    Args:
        seconds: `[N]` of each unit, N at least `num_stages`.
        num_stages: Stages.
        allowed: `[num_stages, N + 1, N + 1]`, whether a stage may hold the units from one position up to another (its
            memory, for instance); None: any.

    Returns:
        None when `allowed` leaves no cut.
    """
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    stage_s = ends[np.newaxis, :] - ends[:, np.newaxis]
    position = np.arange(len(ends))
    possible = (position[:, np.newaxis] < position)[np.newaxis] & (True if allowed is None else allowed)
    possible = np.broadcast_to(possible, (num_stages, *stage_s.shape))
    return cuts_of(np.where(possible, stage_s, np.inf))


def cuts_of(stage_s: Floats) -> Cuts | None:
    """As `best_cuts`, for seconds `[S, N + 1, N + 1]` of stages from one position to another; infinite: never."""
    slowest_s = _sweep(stage_s, np.maximum)[0][-1]
    if slowest_s == np.inf:
        return None
    even = np.where(stage_s <= slowest_s * ROUNDING, stage_s, np.inf) ** 2
    _, came_from = _sweep(even, np.add)
    cuts = [stage_s.shape[1] - 1]
    for stage in reversed(range(len(stage_s))):
        cuts.append(int(came_from[stage][cuts[-1]]))
    return tuple(reversed(cuts))


def _sweep(stage_value: Floats, combine: np.ufunc) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """Least value of a chain up to each position, and per stage where that stage begins.

    `stage_value` is `[S, N + 1, N + 1]`, `combine` adds up a chain.
    """
    best: Floats = np.where(np.arange(stage_value.shape[1]) == 0, 0.0, np.inf)
    came_from = []
    for values in stage_value:
        total = combine(best[:, np.newaxis], values)
        came_from.append(total.argmin(axis=0))
        best = total.min(axis=0)
    return best, came_from


@functools.lru_cache(maxsize=16384)
def free_cuts(seconds: tuple[float, ...], num_stages: int) -> Cuts:
    """`best_cuts` with nothing forbidden; remembered, since plans ask for the same chains again and again."""
    cuts = best_cuts(np.array(seconds), num_stages)
    assert cuts is not None, f"{len(seconds)} units cannot fill {num_stages} stages"
    return cuts
