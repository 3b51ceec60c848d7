"""The best plan that the configuration of another trainer can say, for `--emit`.

Searched like the baselines, in the part of their space that the trainer has keys for: no pipelines, all layers or none
recomputed, samples packed up to a number of tokens. Megatron-Bridge has pipelines, and takes samples as they come.
Versions that were read: VeOmni 0.1.12, ms-swift 4.6.0, Megatron-Bridge 0.7.0 and torchtitan 0.3.0, whose multimodal
model refuses context parallelism and has tensor parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from dflop.compare.experts.expert_plan import ExpertPlan
from dflop.compare.experts.sharded import EIGHTHS, best_sharded, grids, node_divisors
from dflop.compare.experts.shared_samples import SEQUENCE
from dflop.emit.megatron_bridge import bridge_problems
from dflop.errors import InfeasiblePlanError
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, ParallelSpec, Plan


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trainer has keys for, besides FSDP2 over all ranks, which gathers weights for every pass."""

    has_ulysses: bool = False
    has_hsdp: bool = False
    has_tp: bool = False
    has_ep: bool = False
    has_stages: bool = False
    """Pipelines of all modules on the same ranks, whole weights, and ep that tp and ZeRO-1 go with."""


TRAINERS: Mapping[str, Trainer] = {
    "megatron-bridge": Trainer(has_stages=True),
    "ms-swift": Trainer(has_ulysses=True),
    "torchtitan": Trainer(has_hsdp=True, has_tp=True, has_ep=True),
    "veomni": Trainer(has_ulysses=True, has_hsdp=True, has_ep=True),
}
"""By the names of `--emit`."""


def trainer_plan(problem: Problem, name: str) -> Plan:
    """The plan, with its simulated step; neighbours that share samples are its `cp`, packs its `max_tokens`.

    Args:
        problem: What is planned for.
        name: One of `TRAINERS`.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: no plan that the trainer can run fits in memory.
    """
    trainer, num_processes = TRAINERS[name], problem.cluster.num_processes
    if trainer.has_stages:
        return _in_stages(problem, name)
    among = [
        dataclasses.replace(grid, gathers_experts=ep > 1)
        for ep in (problem.spec(LLM).ep_choices if trainer.has_ep else (1,))
        for grid in grids(problem, SEQUENCE, node_divisors(problem) if trainer.has_ulysses else (1,), ep)
        if (grid.tp == 1 or trainer.has_tp) and (grid.shards * grid.tp == num_processes or trainer.has_hsdp)
        if grid.shards > 1
    ]
    found = best_sharded(problem, SEQUENCE, among, shares=(0, EIGHTHS))
    if found is None:
        raise InfeasiblePlanError(
            f"no plan that {name} can run on {num_processes} GPU(s) fits in memory",
            where=f"--emit {name}",
            hint="give it more GPUs or shorter samples, or emit dflop's own plan with --emit torchrun"
            if among
            else "it shares out weights, for which it needs two GPUs at least",
        )
    return _in_packs(problem, found)


def _in_stages(problem: Problem, name: str) -> Plan:
    """The best plan of one pipeline that Megatron-Bridge has keys for, in arrival order."""
    size, wanted = problem.global_batch_size, problem.space.microbatches
    divisors = tuple(n for n in range(1, size + 1) if not size % n)
    space = dataclasses.replace(
        problem.space, dps=divisors, microbatches=tuple(n for n in wanted if n in divisors) or divisors,
        share_ranks=(True,), shard_parameters=(False,), rules=None, eps=problem.spec(LLM).ep_choices,
        folds_experts=True,
    )  # fmt: skip
    plans = plan_problem(dataclasses.replace(problem, space=space), policy="arrival")
    found = next((plan for plan in plans if not bridge_problems(plan, problem.cluster)), None)
    if found is None:
        why = bridge_problems(plans[0], problem.cluster)[0]
        raise InfeasiblePlanError(
            f"{name} has no keys for any of the {len(plans)} best plans of one pipeline: {why}",
            where=f"--emit {name}",
            hint="give a global batch size with more divisors, or emit dflop's own plan with --emit torchrun",
        )
    return found


def _in_packs(problem: Problem, expert: ExpertPlan) -> Plan:
    """A plan whose microbatches are packs of as many tokens as its mean microbatch has, or the longest sample."""
    plan, n = expert.plan, expert.num_sharing
    tokens = [sample.num_llm_tokens for batch in problem.batches for sample in batch]
    mean_tokens = sum(tokens) / len(tokens)
    num_packs = plan.num_microbatches * plan.module(LLM).parallel.dp // n
    size = max(max(tokens), -(-int(mean_tokens * plan.global_batch_size) // num_packs))
    modules = []
    for m in plan.modules:
        parallel = ParallelSpec(m.parallel.tp, 1, m.parallel.dp // n, cp=n, ep=m.parallel.ep)
        modules.append(dataclasses.replace(m, parallel=parallel, max_tokens=size if m.module == LLM else 0))
    num_samples = round(num_packs * size / mean_tokens)
    return dataclasses.replace(plan, modules=tuple(modules), global_batch_size=num_samples)
