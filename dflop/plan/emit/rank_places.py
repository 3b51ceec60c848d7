"""Where the ranks of a plan sit: by stage, and rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflop.records import ModulePlan, Plan


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank holds: in an inline plan a stage may have layers of several modules."""

    rank: int
    stage: int
    dp_rank: int
    tp_rank: int
    layers: tuple[tuple[str, int, int], ...]
    """(module, first, end) of the layers here, `[first, end)` within the module, in the order they run."""


def stage_ranks(module: ModulePlan, stage: int) -> tuple[tuple[int, ...], ...]:
    """Global ranks of a stage as `[dp_rank][tp_rank]`."""
    p = module.parallel
    first = module.first_rank + stage * p.dp * p.tp
    return tuple(tuple(range(first + d * p.tp, first + (d + 1) * p.tp)) for d in range(p.dp))


def stage_layers(module: ModulePlan, stage: int) -> tuple[int, int]:
    """(first, end) of the module's layers on a stage; equal where it holds none."""
    first = sum(module.layers_per_stage[:stage])
    return first, first + module.layers_per_stage[stage]


def places(plan: Plan) -> Iterator[Place]:
    """Every rank of a plan, ascending."""
    groups = [plan.modules] if plan.is_inline else [(m,) for m in sorted(plan.modules, key=lambda m: m.first_rank)]
    for modules in groups:
        for stage in range(modules[0].parallel.pp):
            cut = ((m.module, *stage_layers(m, stage)) for m in modules)
            layers = tuple((name, first, end) for name, first, end in cut if end > first)
            for dp_rank, ranks in enumerate(stage_ranks(modules[0], stage)):
                for tp_rank, rank in enumerate(ranks):
                    yield Place(rank, stage, dp_rank, tp_rank, layers)
