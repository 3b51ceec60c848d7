"""The grids that plans of one number of microbatches may be made of: chains of stages for subsets of the modules.

Encoders on ranks of their own stand in front of grids with the LLM; they have none of the context parallelism, which
wants all modules in one place.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dflop.plan.chain import Chain
from dflop.plan.grid_choice import Grids
from dflop.plan.space import Problem
from dflop.records import RunMode

MAX_ALIKE = 2
"""Choices of one mode and pp: a few replicas less are all but the same plan, only slower."""
Degrees = tuple[RunMode, int]
"""(mode, pp)."""
Depth = tuple[float, Chain, int]
"""(no grid takes less, chain, its stages)."""


def whole_depths(problem: Problem, num_microbatches: int) -> list[Depth]:
    """`depths` of all modules, where they may share ranks."""
    every = [spec.module for spec in problem.specs]
    if True not in problem.space.share_ranks and len(every) > 1:
        return []
    return depths(problem, num_microbatches, every)


def grids_apart(problem: Problem, num_microbatches: int, limit_s: float) -> list[Grids]:
    """Grids of plans with several, none of which is slower by itself than a limit.

    Of each encoder alone, and of the LLM alone or, where modules may share ranks, with some of the encoders.
    """
    (*encoders, llm), share_ranks = [spec.module for spec in problem.specs], problem.space.share_ranks
    num_processes = problem.cluster.num_processes
    if False not in share_ranks or not encoders or num_processes < 2:
        return []
    if depths(problem, num_microbatches, [llm], num_processes - 1)[0][0] > limit_s:
        return []
    alone = {name: grids_of_encoder(problem, num_microbatches, name, limit_s) for name in encoders}
    found = [grids for of in alone.values() for grids in of]
    for num in range(len(encoders) if True in share_ranks else 1):
        for shared in itertools.combinations(encoders, num):
            others = [of for name, of in alone.items() if name not in shared]
            if all(others):  # they take some time before the LLM, and some processes
                left_s = limit_s - max(min(float(of.fill_s.mean(axis=0).min()) for of in grids) for grids in others)
                left = num_processes - sum(min(int(of.num_processes.min()) for of in grids) for grids in others)
                if left > 0:
                    found += grids_with_llm(depths(problem, num_microbatches, (*shared, llm), left), None, left_s)
    return found


def grids_with_llm(of_depths: Iterable[Depth], top: int | None = None, limit_s: float = math.inf) -> list[Grids]:
    """Grids of modules with the LLM that fit in memory.

    Every tp, cp, ep, pp and dp on at most the processes that other modules leave; as many layers recompute as it takes
    to fit, or all of them, and parameters are shared where that saves some of it. Layers are cut by time; where the
    most replicas fit so only with layers that run again, or not at all, by the time with such layers, too.

    Args:
        of_depths: From `depths`.
        top: Grids to return, the best ones, of one mode and pp no more than two; None: all.
        limit_s: Formula value of what is worth a look.
    """
    every: list[Grids] = []
    best: list[_Kept] = []
    tight: list[tuple[Chain, Grids]] = []
    for least_s, chain, pp in of_depths:
        if least_s > limit_s:
            break
        without: set[int] = set()  # groups that fit as they are: saving more memory than that would be slower
        fits_so = False
        for cut in chain.cuts(pp, limit_s):
            fitting, uneven = chain.choices(cut, without=without, limit_s=limit_s)
            if top is None:
                every += fitting
            else:
                best, limit_s = _narrowed(best, fitting, top, limit_s)
            if uneven is not None and (fitting or not fits_so):
                tight.append((chain, uneven))
            fits_so = fits_so or bool(fitting)
            without |= {int(dp) for grids in fitting for dp in grids.dp[grids.num_recomputed == 0]}
    most = {_degrees(grids): grids for _, grids in sorted(tight, key=lambda pair: int(pair[1].shards[0]))}
    held: dict[Degrees, Grids | None] = {}
    # Cut by time alone they would be at least this fast, which decides whether it is worth looking for other cuts.
    for chain, grids in sorted(tight, key=lambda pair: _order(pair[1])):
        if grids.alone_s[0] > limit_s:
            break
        key = _degrees(grids)
        if key not in held:  # where it does not fit with most of it shared out, it does not with less
            held[key] = chain.within_memory(most[key])
        within = held[key]
        if within is not None and grids is not most[key]:
            within = chain.within_memory(grids)
        if within is not None and within.alone_s[0] <= limit_s:
            if top is None:
                every.append(within)
            else:
                best, limit_s = _narrowed(best, [within], top, limit_s)
    return every if top is None else [one.grids for one in best]


def grids_of_encoder(problem: Problem, num_microbatches: int, module: str, limit_s: float = math.inf) -> list[Grids]:
    """Grids of an encoder alone that fit in memory in front of some LLM; none is slower by itself than a limit."""
    chains = (Chain.of(problem, tp, num_microbatches, modules=[module]) for tp in problem.tps(problem.spec(module)))
    return [grids for chain in chains for pp in range(1, chain.max_pp + 1) for grids in chain.in_front(pp, limit_s)]


def depths(problem: Problem, num_microbatches: int, modules: Sequence[str], most_processes: int = 0) -> list[Depth]:
    """Every depth of every chain of modules with the LLM, ascending by the least that a grid may take.

    Args:
        problem: What to plan for.
        num_microbatches: Per step.
        modules: That share the ranks.
        most_processes: That other modules leave; 0: one for each of them.
    """
    tps = set.intersection(*(set(problem.tps(problem.spec(module))) for module in modules))
    found = []
    for tp in sorted(tp for tp in tps if not most_processes or tp <= most_processes):
        shared = [(cp, ep) for cp in problem.cps(tp) for ep in problem.eps(tp, cp)]
        for cp, ep in shared if len(modules) == len(problem.specs) else [(1, 1)]:
            chain = Chain.of(problem, tp, num_microbatches, cp, modules, most_processes, ep)
            found += [(chain.at_least_s(pp), chain, pp) for pp in range(1, chain.max_pp + 1)]
    return sorted(found, key=lambda depth: depth[0])


class _Kept(NamedTuple):
    """One grid, and what it is sorted and told apart by."""

    order: tuple[float, int, int, int, int, int, int]
    kind: tuple[Degrees, bool, bool]
    grids: Grids


def _narrowed(kept: Sequence[_Kept], more: Iterable[Grids], top: int, limit_s: float) -> tuple[list[_Kept], float]:
    """(the best `top`, `MAX_ALIKE` of each mode, pp and way to save memory; value of what may be among them)."""
    new = list(_one_by_one(more, limit_s))
    if not new:
        return list(kept), limit_s
    seen: Counter[tuple[Degrees, bool, bool]] = Counter()
    found: list[_Kept] = []
    for each in sorted((*kept, *new), key=lambda one: one.order):
        if found and each.order == found[-1].order and each.grids.choice(0) == found[-1].grids.choice(0):
            continue
        seen[each.kind] += 1
        if seen[each.kind] <= MAX_ALIKE:
            found.append(each)
    return found[:top], min(limit_s, found[top - 1].order[0]) if len(found) >= top else limit_s


def _one_by_one(several: Iterable[Grids], limit_s: float) -> Iterator[_Kept]:
    """The best `MAX_ALIKE` grids with all layers recomputed, and of the others, up to a limit."""
    for grids in several:
        order = np.lexsort([grids.num_recomputed, grids.num_processes, grids.alone_s])
        order = order[grids.alone_s[order] <= limit_s]
        all_again = (grids.again[:, order] == grids.layers[:, order]).all(axis=(0, 2))
        for is_all in (True, False):
            for k in order[all_again == is_all][:MAX_ALIKE].tolist():
                one = grids.select(slice(k, k + 1))
                yield _Kept(_order(one), (_degrees(one), bool(one.shards[0] > 1), is_all), one)


def _order(grids: Grids) -> tuple[float, int, int, int, int, int, int]:
    first, mode = (float(grids.alone_s[0]), int(grids.num_processes[0])), grids.mode
    return *first, mode.cp, mode.ep, mode.tp, grids.pp, int(grids.num_recomputed[0])


def _degrees(grids: Grids) -> Degrees:
    return grids.mode, grids.pp
