"""What a user of FSDP2 or HSDP runs: every GPU a replica of the whole model, parameters shared out, nothing else cut.

Groups of a node or of all replicas, any number of microbatches; as few eighths of the layers recompute as memory asks
for, an eighth more, or all. The layout is tuned for the batches that it is run with, as that of the uniform plans is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dflop.plan.baselines.uniform import fastest
from dflop.plan.candidates import recompute_ways, shard_choices
from dflop.plan.drafts import fits, inline_draft
from dflop.plan.space import Problem
from dflop.records import ParallelSpec, Plan


def tuned_sharded(problem: Problem, step_s: Callable[[Plan], float]) -> Plan | None:
    """The best such plan that anyone could find by trying; None where none fits.

    Args:
        problem: What to plan for.
        step_s: Seconds of a step under a plan; infinite where it runs out of memory.

    Raises:
        CostError: a module without costs.
    """
    return fastest(_plans(problem), step_s)


def _plans(problem: Problem) -> Iterator[Plan]:
    dp = problem.cluster.num_processes
    if dp > problem.global_batch_size or any(1 not in problem.tps(spec) for spec in problem.specs):
        return
    groups = sorted({int(shards[0]) for shards in shard_choices(problem, 1, np.array([dp])) if shards[0] > 1})
    ways = set.intersection(*(set(recompute_ways(problem, spec.module, 1)) for spec in problem.specs))
    eighths = [n for n in range(9) if ways >= {n > 0}]
    for shards in groups:
        for m in problem.microbatch_choices:
            if m * dp <= problem.global_batch_size:
                fitting = [p for p in (_plan(problem, m, shards, n) for n in eighths) if fits(problem, p)]
                yield from dict.fromkeys([*fitting[:2], *fitting[-1:]])


def _plan(problem: Problem, num_microbatches: int, shards: int, eighths: int) -> Plan:
    """With so many eighths of every module's layers recomputed."""
    return inline_draft(
        problem,
        num_microbatches,
        ParallelSpec(1, 1, problem.cluster.num_processes),
        {spec.module: (spec.num_layers,) for spec in problem.specs},
        recompute={spec.module: (-(-spec.num_layers * eighths // 8),) for spec in problem.specs},
        shard_optimizer=True,
        formula_s=float("nan"),
        parameter_shards=shards,
    )
