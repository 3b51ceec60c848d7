"""What a plan could not have more of: memory, processes, ways to cut modules and batches. In numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dflop import units
from dflop.plan.space import USABLE_MEMORY_FRAC, Problem
from dflop.plan.worst import samples_beyond
from dflop.records import LLM, ModulePlan, Plan

BINDING_FRAC = 0.9
"""Share of a limit from which it is called binding: the next larger choice rarely fits into the rest."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Something the plan uses a part of."""

    name: str
    used_frac: float
    """Above 1 only for what cannot be helped: a sample longer than an average microbatch, or than memory holds."""
    text: str

    @property
    def is_binding(self) -> bool:
        return self.used_frac >= BINDING_FRAC


def plan_limits(problem: Problem, plan: Plan, largest_tokens: Mapping[str, int]) -> tuple[Limit, ...]:
    """Every limit, those nearest to their end first.

    Args:
        problem: What the plan is for.
        plan: The plan.
        largest_tokens: Per module, tokens of the largest microbatch that was scheduled on one replica.
    """
    found = [
        *(_memory(problem, plan, pipe) for pipe in plan.pipes),
        *(_tokens(m, largest_tokens[m.module]) for m in plan.modules if m.max_tokens),
        *(_tp(problem, plan, m) for m in plan.pipes),
        *_counts(problem, plan),
        *_whole_samples(problem),
        _longest_sample(problem, plan),
        *_beyond(problem, plan),
    ]
    return tuple(sorted(found, key=lambda limit: -limit.used_frac))


def _memory(problem: Problem, plan: Plan, pipe: ModulePlan) -> Limit:
    most = max(pipe.stage_memory_bytes)
    stage, usable_bytes, name = pipe.stage_memory_bytes.index(most), problem.usable_bytes, _name(plan, pipe)
    ways = ("recomputation" if pipe.recompute else "", "offload" if pipe.offloaded else "", pipe.sharding)
    saved = " and ".join(filter(None, ways))
    text = (
        f"stage {stage} needs {units.num_bytes(most)} of {units.num_bytes(usable_bytes)} usable "
        f"({USABLE_MEMORY_FRAC:.0%} of the device)" + f", with {saved}" * bool(saved)
    )
    return Limit(f"memory of {name}", most / usable_bytes, text)


def _tokens(module: ModulePlan, largest: int) -> Limit:
    """The memory's limit as the scheduler sees it."""
    text = f"largest scheduled microbatch: {units.count(largest)}, memory holds {units.count(module.max_tokens)}"
    return Limit(f"tokens of {module.module}", largest / module.max_tokens, text)


def _tp(problem: Problem, plan: Plan, module: ModulePlan) -> Limit:
    specs = [problem.spec(m.module) for m in plan.grid_of(module.module)]
    spec = min(specs, key=lambda s: problem.tps(s)[-1])
    most, tp, each = problem.tps(spec)[-1], module.parallel.tp, problem.cluster.num_processes_per_node
    beyond = [degree for degree in spec.tp_choices if degree > most]
    if not beyond:
        why = f"heads and sizes of {spec.module}"
    elif all(degree > each or each % degree for degree in beyond):
        why = f"{each} processes of a node"
    else:
        why = f"cost tables of {spec.module}"
    return Limit(f"tp of {_name(plan, module)}", tp / most, f"tp {tp} of at most {most}, limited by {why}")


def _whole_samples(problem: Problem) -> Iterator[Limit]:
    if why := problem.space.whole_samples:
        yield Limit("cp", 1.0, f"cp 1 of at most 1: {why}")


def _counts(problem: Problem, plan: Plan) -> Iterator[Limit]:
    num_processes, m, dp = problem.cluster.num_processes, plan.num_microbatches, plan.module(LLM).parallel.dp
    most, batch = problem.microbatch_choices[-1], plan.global_batch_size
    yield Limit("processes", plan.num_processes / num_processes, f"{plan.num_processes} of {num_processes} assigned")
    yield Limit("microbatches", m / most, f"{m} of at most {most}")
    who = "replica" if plan.module(LLM).parallel.cp == 1 else "group"
    each = f"{batch / (m * dp):.3g} per microbatch of a {who}"
    yield Limit("samples", m * dp / batch, f"{batch} in {m} microbatches on {dp} {who}s: {each}")


def _longest_sample(problem: Problem, plan: Plan) -> Limit:
    """Beside what it can be balanced with: a microbatch in a pipeline, the whole step of a replica without one."""
    llm = plan.module(LLM).parallel
    is_pipeline = llm.pp > 1 or len(plan.pipes) > 1
    num_buckets = llm.dp * (plan.num_microbatches if is_pipeline else 1)
    samples = (*itertools.chain.from_iterable(problem.batches), *problem.worst_samples)
    longest = max(samples, key=lambda s: s.num_llm_tokens)
    average = statistics.fmean(float(items[LLM].num_tokens.sum()) / num_buckets for items in problem.batch_items)
    of = ("microbatch" if is_pipeline else "step") + f" of a {'replica' if llm.cp == 1 else 'group'}"
    text = (
        f"`{longest.sample_id}` has {units.count(longest.num_llm_tokens)} LLM tokens; an average {of} has "
        f"{units.count(round(average))}"
    )
    return Limit("longest sample", longest.num_llm_tokens / average, text)


def _beyond(problem: Problem, plan: Plan) -> Iterator[Limit]:
    """Samples that no plan holds, the worst of them."""
    if found := samples_beyond(problem, plan):
        more = f"; {len(found) - 1} more do not fit" * (len(found) > 1)
        usable = units.num_bytes(problem.usable_bytes)
        yield Limit("largest samples", found[0].need_bytes / problem.usable_bytes, f"{found[0]} of {usable}{more}")


def _name(plan: Plan, module: ModulePlan) -> str:
    """`llm`, or `the pipeline` where its stages hold several modules."""
    return "the pipeline" if len(plan.grid_of(module.module)) > 1 else module.module
