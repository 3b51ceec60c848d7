"""Which layers of the LLM keep their activations on the host instead of running again in the backward pass.

As many as hide their copies behind the passes of their stage, in either direction, and fit in the host's memory. They
are spread over a stage, so that few of them wait for a copy at a time (`models/offload.py`). An encoder's layers are
too narrow for that: copying takes several times their pass.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dflop.plan.memory import layer_bytes
from dflop.plan.space import Problem
from dflop.plan.sync import average_passes_s
from dflop.records import LLM, ModulePlan, RunMode
from dflop.schedule.items import Ints
from dflop.simulate.order import in_flight

LOCKED_RATIO = 2
"""Page-locked bytes over those of tensors, at most: torch rounds each of them up to a power of two."""


def offloaded_layers(
    problem: Problem, layers: Ints, again: Ints, num_microbatches: int, depth: Ints, mode: RunMode, *, dp: Ints
) -> Ints:
    """`[C, P]`: layers of the LLM whose activations go to the host.

    Args:
        problem: With what its space has of the host.
        layers: `[C, P]`, all of the LLM's.
        again: `[C, P]`, those that would run again.
        num_microbatches: Per step.
        depth: `[P]`, microbatches in flight.
        mode: Tensor-parallel and context-parallel degree.
        dp: `[C]`, groups.
    """
    space = problem.space
    if not space.host_bytes or space.rules is not None or not again.any():
        return np.zeros_like(layers)
    loads, buckets = problem.sample_loads[LLM], num_microbatches * dp
    average, largest = (
        layer_bytes(problem.spec(LLM), problem.cost, load, mode)
        for load in (loads.typical(buckets), loads.largest(buckets))
    )
    shortest_s = average_passes_s(problem, problem.spec(LLM), mode, buckets).min(axis=0)
    hidden = layers * np.minimum(1.0, space.host_bytes_per_s * shortest_s / average)[:, np.newaxis]
    held = space.host_bytes / (depth * LOCKED_RATIO * largest[:, np.newaxis])
    found: Ints = np.minimum(again, np.minimum(hidden, held)).astype(np.int64)
    return found


def with_host(problem: Problem, llm: ModulePlan, num_microbatches: int) -> ModulePlan:
    """The LLM's place with activations on the host, where it would recompute and copies hide."""
    p, layers = llm.parallel, np.array([llm.layers_per_stage])
    again, depth = np.array([llm.num_recomputed]), in_flight(num_microbatches, np.arange(p.pp)[::-1])
    groups = np.array([p.dp])
    found = offloaded_layers(problem, layers, again, num_microbatches, depth, p.mode, dp=groups)
    if not found.any():
        return llm
    left = tuple((again - found)[0].tolist())
    some = left if any(left) and left != llm.layers_per_stage else ()
    return dataclasses.replace(llm, recompute=any(left), recomputed=some, offloaded=tuple(found[0].tolist()))
