"""From a plan and the shapes of one global batch to the step plan that ends soonest under the simulator.

The candidates are in `policies.py`; the best one is returned, the data-blind order among them, so that scheduling never
loses against not scheduling. What exceeds the plan's memory does not stand for election while anything else does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop.cost.model import CostModel
from dflop.errors import ConfigError, did_you_mean
from dflop.records import Plan, SampleShape, StepPlan
from dflop.schedule.assignment import assignment_of
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import module_items
from dflop.schedule.policies import POLICIES, Effort, StepJob
from dflop.simulate.step import Node, step_nodes


def schedule_step(
    *,
    run_id: str,
    step: int,
    plan: Plan,
    batch: Sequence[SampleShape],
    cost: CostModel,
    max_concurrency: int | None = None,
    policy: str = "balanced",
    effort: Effort | None = None,
    slowness: Mapping[Node, float] | None = None,
) -> StepPlan:
    """Step plan of one global batch; a pure function of its arguments.

    Args:
        run_id: Copied into the step plan.
        step: Copied into the step plan.
        plan: Layout and number of microbatches.
        batch: Samples in arrival order; may be shorter than the plan's global batch (end of an epoch).
        cost: Predicts seconds, corrections included; extrapolates if it must, for no batch may stop training.
        max_concurrency: Processes that can compute at once, when fewer than the plan has.
        policy: One of `POLICIES`; `balanced` and `quick` return the best of their candidates.
        effort: Budget of the search.
        slowness: Per node of `step_nodes(plan)` what multiplies all its seconds, so that it is given less; 1.0 where
            absent.

    Raises:
        ConfigError: unknown policy.
        CostError: a module or tp of the plan has no cost table.
    """
    if policy not in POLICIES:
        raise ConfigError(f"unknown scheduling policy `{policy}`", hint=did_you_mean(policy, POLICIES))
    job = StepJob(plan, batch, cost, max_concurrency, slowness=slowness)
    effort = effort or Effort()
    arrival = job.assign("arrival", effort)
    arrival_s = job.judge.step_s(arrival)
    if policy == "arrival":
        chosen, assignment, step_s = policy, arrival, arrival_s
    elif policy in ("balanced", "quick"):
        chosen, assignment, step_s = job.best(effort) if policy == "balanced" else job.quick(effort)
    else:
        chosen, assignment = policy, job.assign(policy, effort)
        step_s = job.judge.step_s(assignment)
    return StepPlan(
        run_id=run_id,
        step=step,
        policy=chosen,
        sample_index=tuple(s.sample_index for s in batch),
        num_microbatches=plan.num_microbatches,
        work=tuple(job.items[name].work(owner) for name, owner in assignment.owners(plan, job.items).items()),
        num_supervised_tokens=sum(s.num_supervised_tokens for s in batch),
        predicted_step_s=step_s,
        arrival_step_s=arrival_s,
    )


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """What one stage is expected to see of one microbatch: the predicted half of a `MicrobatchSpan`."""

    microbatch: int
    num_items: int
    num_tokens: int
    sum_sq_tokens: int
    forward_s: float
    backward_s: float


def predicted_spans(
    plan: Plan,
    step_plan: StepPlan,
    batch: Sequence[SampleShape],
    cost: CostModel,
    slowness: Mapping[Node, float] | None = None,
) -> dict[Node, tuple[PredictedSpan, ...]]:
    """Per (module, stage, dp_rank) one span per microbatch, empty microbatches included.

    Args:
        plan: The layout `step_plan` was made for.
        step_plan: Owners.
        batch: The samples of `step_plan.sample_index`, in that order.
        cost: The cost model the step was scheduled with.
        slowness: With which it was scheduled, by node: it goes for all modules of a grid.
    """
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    judge, assignment = (
        StepEvaluator(plan, items, cost.extrapolating(), slowness=slowness),
        assignment_of(plan, step_plan),
    )
    spans: dict[Node, tuple[PredictedSpan, ...]] = {}
    for m in plan.modules:
        load = judge.loads(assignment)[m.module]
        counts = load.astype(np.int64).transpose(2, 1, 0).tolist()
        for stage, seconds in enumerate(judge.part_seconds(m, load, assignment)):
            times = judge.slowness[plan.grid_of(m.module)[-1].module][stage]
            for rank, taken in enumerate((seconds * times).transpose(2, 1, 0).tolist()):
                both = zip(counts[rank], taken, strict=True)
                spans[m.module, stage, rank] = tuple(PredictedSpan(k, *n, *s) for k, (n, s) in enumerate(both))
    return spans


def stage_spans(plan: Plan, spans: Mapping[Node, Sequence[PredictedSpan]]) -> dict[Node, tuple[PredictedSpan, ...]]:
    """Predicted spans as ranks measure them: a node per stage of a grid, with the seconds of all of its modules.

    Its loads are those of the module that stands for the grid: with the LLM the samples that the microbatch has.
    """
    parts_of = {pipe.module: [m.module for m in plan.grid_of(pipe.module)] for pipe in plan.pipes}
    return {
        (module, stage, rank): tuple(
            replace(
                span,
                forward_s=sum(spans[part, stage, rank][k].forward_s for part in parts_of[module]),
                backward_s=sum(spans[part, stage, rank][k].backward_s for part in parts_of[module]),
            )
            for k, span in enumerate(spans[module, stage, rank])
        )
        for module, stage, rank in step_nodes(plan)
    }
