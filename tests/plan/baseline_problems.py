"""A small problem for the planners we compare with."""

from __future__ import annotations

import dataclasses

from dflop.cost.model import CostModel
from dflop.plan.space import Problem, SearchSpace
from tests.builders import make_cluster, make_specs, make_table, random_batch


def make_problem(*encoders, num_processes=8, memory_bytes=2**34, batches=None, space=None, **llm_changes):
    """Tables at tp 1 and 2, with and without recomputation; four layers each."""
    encoders = encoders or ("vision",)
    specs = [dataclasses.replace(s, tp_choices=(1, 2), max_pp=4) for s in make_specs(*encoders)]
    specs[-1] = dataclasses.replace(specs[-1], **llm_changes)
    tables = [
        make_table(
            spec.module,
            tp=tp,
            table_id=f"{spec.module}-{tp}-{recompute}",
            per_token_s=(1 + recompute / 3) * 1e-5 / tp,
            activation_bytes_per_token=1e3 if recompute else 1e4,
            recompute=recompute,
        )
        for spec in specs
        for tp in (1, 2)
        for recompute in (False, True)
    ]
    if batches is None:
        batches = tuple(random_batch(24, encoders=encoders, seed=seed) for seed in range(2))
    return Problem(
        "run",
        tuple(specs),
        make_cluster(num_processes, num_cores=num_processes, memory_bytes=memory_bytes),
        CostModel(tables, extrapolate=True),
        batches,
        len(batches[0]),
        0,
        space or SearchSpace(),
    )


def tiles_the_cluster(problem, plan):
    ranks = [
        rank
        for m in (plan.modules[-1:] if plan.is_inline else plan.modules)
        for rank in range(m.first_rank, m.first_rank + m.parallel.num_processes)
    ]
    return sorted(ranks) == list(range(problem.cluster.num_processes))
