"""From a plan and the shapes of one global batch to the step plan that ends soonest under the simulator.

The candidates are in `policies.py`; the best one is returned, the data-blind order among them, so that scheduling never
loses against not scheduling. What exceeds the plan's memory does not stand for election while anything else does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dflop.cost.model import CostModel
from dflop.records import Plan, SampleShape, StepPlan
from dflop.schedule.anneal import search
from dflop.schedule.assignment import assignment_of, split_items
from dflop.schedule.data_parallel import balance_ranks
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import module_items
from dflop.schedule.linear import LinearStep, Part
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.state import make_task
from dflop.simulate.step import Node


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
    job, effort = StepJob(plan, batch, cost, max_concurrency, slowness=slowness), effort or Effort()
    chosen, assignment, step_s = job.choose(policy, effort)
    arrival_s = job.judge.step_s(job.assign("arrival", effort))
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


class PredictedSpan(NamedTuple):
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
) -> dict[Node, list[PredictedSpan]]:
    """Per node of `step_nodes`, as its ranks measure it, one span per microbatch, empty microbatches included.

    Seconds are of all modules on the stage, loads those of the module that stands for the grid: with the LLM, samples.

    Args:
        plan: The layout `step_plan` was made for.
        step_plan: Owners.
        batch: The samples of `step_plan.sample_index`, in that order.
        cost: The cost model the step was scheduled with.
        slowness: With which it was scheduled, by node.
    """
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    judge = StepEvaluator(plan, items, cost.extrapolating(), slowness=slowness)
    assignment = assignment_of(plan, step_plan)
    loads = judge.loads(assignment)
    spans: dict[Node, list[PredictedSpan]] = {}
    for pipe in plan.pipes:
        counts = loads[pipe.module].astype(np.int64).transpose(2, 1, 0).tolist()
        of_modules = [judge.part_seconds(m, loads[m.module], assignment) for m in plan.grid_of(pipe.module)]
        for stage, seconds in enumerate(zip(*of_modules, strict=True)):
            taken = sum(of * judge.slowness[pipe.module][stage] for of in seconds)
            for rank, of_rank in enumerate(np.transpose(taken, (2, 1, 0)).tolist()):
                both = zip(counts[rank], of_rank, strict=True)
                spans[pipe.module, stage, rank] = [PredictedSpan(k, *n, *s) for k, (n, s) in enumerate(both)]
    return spans


def warm() -> None:
    """Compile or load every kernel by running it on next to nothing: tens of seconds the first time, else one."""
    tokens, seconds = np.array([5, 4, 3, 2, 1, 1], dtype=np.int64), np.array([5.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    balance_ranks(seconds, tokens, 2, cap_tokens=10, num_microbatches=2, max_evals=100, tolerance=0.0)
    split_items(tokens % 2, seconds, 2, 2)
    # Two microbatches on two ranks, fed by one encoder.
    step = LinearStep(
        num_slots=2, num_ranks=2, chain_s=seconds[None], chain_slowness=np.ones((1, 2)), slot_s=seconds[None],
        largest_s=seconds[None], tokens=tokens, num_items=np.ones((1, len(tokens)), dtype=np.int64),
        pipe_pp=np.array([1, 1]), stage_parts=((Part(0, 0.0, 0.5),),) * 2, num_after=np.array([1, 0]),
        cap_tokens=int(tokens.sum()), window=1, cap_in_flight_tokens=int(tokens.sum()), media_tokens=tokens[None],
        cap_media_tokens=np.zeros(1, dtype=np.int64), on_chain=np.zeros(1, dtype=np.bool_),
    )  # fmt: skip
    search(make_task(step), [tokens % 4], depth=2, num_profiles=2, num_moves=10)
