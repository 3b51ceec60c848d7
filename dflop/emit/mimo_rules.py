"""What Megatron-Bridge's MIMO accepts as a layout of modules: constraints of the search, and a check of a plan.

MIMO trains every module on its own ranks with its own degrees. Source of the rules: Megatron-Bridge at 067f987
(2026-08-22), its parallelism config, builder, data loader and Qwen3.5-VL provider, and Megatron Core's division of
layers among pipeline stages. One rule is one message here, and says its reason:

- tp is a power of two, and of two modules' dp one divides the other: messages between modules fan in and out so.
- A microbatch is cut evenly, in order, among the dp ranks of every module; its size is one number for all steps.
- Stages may differ in depth only at the ends: between first and last all hold the same number of layers. A free layout
  exists in Megatron Core, but asks a process group that MIMO sets up only after the layers are built.
- Encoders have one stage: the validation allows more, but the encoders that come with it are built whole.
- Recomputation is one switch: encoders take it over from the language model.
- Ranks of modules do not overlap, start at 0 and leave none out. No context or expert parallelism here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dflop.records import LLM, ParallelSpec, Plan

if TYPE_CHECKING:  # the search knows its emitters' rules, these need no search
    from dflop.plan.columns import Columns
    from dflop.schedule.items import Ints


class Layout(Protocol):
    """What the rules look at: a `ModulePlan`, say."""

    @property
    def parallel(self) -> ParallelSpec: ...
    @property
    def layers_per_stage(self) -> tuple[int, ...]: ...
    @property
    def recompute(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class MimoRules:
    """The rules as yes or no, for the search, and in words. What couples modules couples two of them, or sums ranks."""

    def microbatches_ok(self, layouts: Mapping[str, Layout], num_microbatches: int, global_batch_size: int) -> bool:
        """Whether every module can cut its microbatches evenly; no layouts: whether they can be equal at all."""
        return not self.batch_problems(layouts, num_microbatches, global_batch_size)

    def parts(self, columns: Columns, num_samples: int) -> Iterator[Ints]:
        """The allowed part of a search space, as spaces without a rule between modules.

        Every choice of an allowed column per module is in one of them at least, and they hold no other choices; the
        best of the best of each is the best of all. There are few: replicas divide the microbatch, so they are chains
        of its divisors, one where it is a power of two.

        Args:
            columns: Each of one module; their layers are taken through `nearest_layers` afterwards.
            num_samples: Samples of a microbatch, all replicas together.

        Yields:
            Indices of columns, some of every module.
        """
        tp, pp, dp, _, _, again, _ = columns.degrees
        num_layers = columns.num_layers
        alone = (tp & (tp - 1) == 0) & ((pp == 1) | columns.with_llm) & ((again == 0) | (again == num_layers))
        for recompute in (False, True):
            fine = alone & ((again > 0) == recompute)
            degrees = {n for n in dp[fine].tolist() if num_samples % n == 0}
            for dps in _chains((), sorted(degrees)):
                part = np.flatnonzero(fine & np.isin(dp, dps))
                if columns.holds[:, part].any(axis=1).all():
                    yield part

    def nearest_layers(self, layers_per_stage: tuple[int, ...]) -> tuple[int, ...]:
        """The split nearest to one of ours that can be said: the last stage stays, the first gets what is left over.

        No stage before the last is deeper than the deepest was, so the slowest is as fast as before; unless that would
        leave the first stage without a layer.
        """
        if end_layers(layers_per_stage) is not None:
            return layers_per_stage
        *before, last = layers_per_stage
        num_layers, num_between = sum(before), len(before) - 1
        each = -(-num_layers // len(before))
        if num_layers - each * num_between < 1:
            each -= 1
        return (num_layers - each * num_between, *[each] * num_between, last)

    def module_problems(self, module: str, layout: Layout) -> list[str]:
        """The rules a module breaks by itself."""
        p, found = layout.parallel, []
        if p.tp & (p.tp - 1):
            found.append(f"`{module}` has tp {p.tp}, which is not a power of two")
        found += [f"`{module}` has {name} {n}; modules have none" for name, n in (("cp", p.cp), ("ep", p.ep)) if n > 1]
        if module != LLM and p.pp > 1:
            found.append(f"encoder `{module}` has {p.pp} stages; encoders have one")
        if end_layers(layout.layers_per_stage) is None:
            found.append(f"`{module}` has {layout.layers_per_stage} layers per stage; only first and last may differ")
        return found

    def pair_problems(self, one: tuple[str, Layout], other: tuple[str, Layout]) -> list[str]:
        """The rules two modules, given as (name, layout), break together."""
        (name_a, a), (name_b, b) = one, other
        dps, found = (a.parallel.dp, b.parallel.dp), []
        if max(dps) % min(dps):
            found.append(f"dp {dps[0]} of `{name_a}` and dp {dps[1]} of `{name_b}`: neither divides the other")
        if a.recompute != b.recompute:
            found.append(f"of `{name_a}` and `{name_b}` only one recomputes; they share one switch")
        return found

    def batch_problems(self, layouts: Mapping[str, Layout], num_microbatches: int, global_batch_size: int) -> list[str]:
        """The rules broken by the size of the microbatches."""
        size, rest = divmod(global_batch_size, num_microbatches)
        if rest:
            return [f"{num_microbatches} microbatches of a global batch of {global_batch_size} are not equal"]
        return [
            f"a microbatch of {size} samples does not divide evenly over dp {layout.parallel.dp} of `{module}`"
            for module, layout in layouts.items()
            if size % layout.parallel.dp
        ]


def mimo_problems(plan: Plan, num_gpus: int) -> list[str]:
    """Every rule a plan breaks, in words; empty when MIMO accepts it.

    Args:
        plan: Any plan.
        num_gpus: Of the cluster; a plan may use fewer, then as many processes are started.
    """
    if len(plan.pipes) < len(plan.modules):
        shared = ", ".join("+".join(m.module for m in grid) for grid in plan.grids if len(grid) > 1)
        return [f"the plan colocates {shared}; every module needs dedicated ranks"]
    rules, layouts = MimoRules(), {m.module: m for m in plan.modules}
    found = [f"no module `{LLM}`"] if LLM not in layouts else []
    found += [problem for m in plan.modules for problem in rules.module_problems(m.module, m)]
    found += [f"`{m.module}` shards parameters ({m.sharding})" for m in plan.modules if m.parameter_shards > 1]
    for pair in itertools.combinations(layouts.items(), 2):
        found += rules.pair_problems(*pair)
    found += rules.batch_problems(layouts, plan.num_microbatches, plan.global_batch_size)
    return found + _rank_problems(plan, num_gpus)


def _rank_problems(plan: Plan, num_gpus: int) -> list[str]:
    found, end = [], 0
    for m in sorted(plan.modules, key=lambda m: m.first_rank):
        if m.first_rank != end:
            found.append(f"`{m.module}` starts at rank {m.first_rank}, the ranks before it end at {end}")
        end = m.first_rank + m.parallel.num_processes
    return found if end <= num_gpus else [*found, f"the plan has {end} processes, the cluster {num_gpus} GPUs"]


def _chains(start: tuple[int, ...], numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """`start` made longer by numbers that divide one another, in every way that ends with none left to add."""
    if not numbers:
        yield start
    for n in numbers:
        if not any(n % other == 0 for other in numbers if other != n):
            yield from _chains((*start, n), [other for other in numbers if other != n and other % n == 0])


def end_layers(layers_per_stage: tuple[int, ...]) -> tuple[int | None, int | None] | None:
    """How a layer split is said to Megatron: (layers of the first stage, of the last), None for one like the rest.

    None altogether when it cannot be said: stages in between differ, or a stage is empty.
    """
    if min(layers_per_stage) < 1:
        return None
    *most, last = layers_per_stage
    first, *rest = layers_per_stage
    if len(set(layers_per_stage)) == 1:
        return None, None
    if len(set(rest)) == 1:
        return first, None
    if len(set(most)) == 1:
        return None, last
    return (first, last) if len(set(rest[:-1])) == 1 else None
