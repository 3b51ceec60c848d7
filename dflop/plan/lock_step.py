"""Steps of replicas that meet in every microbatch: those that share out parameters, each of them on one stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop.cost.model import Floats
from dflop.plan.candidates import layer_and_edge_seconds
from dflop.plan.space import Problem
from dflop.records import ModuleSpec, RunMode


def together_s(
    problem: Problem,
    specs: Sequence[ModuleSpec],
    mode: RunMode,
    num_microbatches: int,
    dp: int,
    average_s: Floats,
    plain_s: Floats,
) -> Floats:
    """`[S]`: a step of groups that meet in every microbatch.

    A microbatch takes no less than its longest sample: at best the longest ones of all share the first, and so on.

    Args:
        problem: Batches and costs.
        specs: Of the modules that they hold.
        mode: Tensor-parallel and context-parallel degree.
        num_microbatches: Per step.
        dp: Groups.
        average_s: `[S]`, what an average microbatch takes them.
        plain_s: The same without layers that run again, and without messages of parameters.
    """
    found = []
    for longest_s, mean_s, without_s in zip(_sample_seconds(problem, specs, mode), average_s, plain_s, strict=True):
        slower = mean_s / without_s if without_s > 0 else 1.0
        firsts_s = slower * longest_s[: num_microbatches * dp : dp]
        rest = num_microbatches - len(firsts_s)
        found.append(float(np.maximum(firsts_s, mean_s).sum()) + rest * mean_s)
    return np.array(found)


def _sample_seconds(problem: Problem, specs: Sequence[ModuleSpec], mode: RunMode) -> tuple[Floats, ...]:
    """Per batch the seconds of each of its samples in all layers of modules, longest first."""
    known, key = problem.sample_seconds, (*(spec.module for spec in specs), mode)
    if key not in known:
        seconds: list[Floats] = [np.zeros(len(batch)) for batch in problem.batches]
        for spec in specs:
            for total_s, load in zip(seconds, problem.sample_loads[spec.module].units, strict=True):
                layer_s, edge_s = layer_and_edge_seconds(problem.cost, spec.module, load.astype(np.float64), mode)
                total_s += spec.num_layers * layer_s + edge_s
        known[key] = tuple(np.sort(of_batch)[::-1] for of_batch in seconds)
    return known[key]
