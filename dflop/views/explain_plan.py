"""Why a plan is the plan: simulates its batches again, weighs every limit, and plans anew for other circumstances."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflop.cost.model import Floats
from dflop.errors import ConfigError, InfeasiblePlanError
from dflop.plan.limits import plan_limits
from dflop.plan.rank import thorough
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.plan.worst import samples_beyond
from dflop.records import Plan
from dflop.report.explain_page import Explanation, StageUse, TimeUse, Variation
from dflop.report.plan_picture import SimulatedStep, save_plan_steps
from dflop.report.plots import check_suffix
from dflop.report.tables import stage_layers, stage_name
from dflop.run.messages import Meter, Say
from dflop.schedule.assignment import Assignment
from dflop.schedule.evaluate import bucket_tokens
from dflop.schedule.policies import StepJob
from dflop.simulate.kernel import makespan_s
from dflop.simulate.step import step_nodes


@dataclasses.dataclass(frozen=True, slots=True)
class _Step(SimulatedStep):
    """One sampled batch under the plan."""

    job: StepJob
    assignment: Assignment


def explain_plan(problem: Problem, plans: Sequence[Plan], say: Say, *, sensitivity: bool = True) -> Explanation:
    """Explains the first of `plans`, which `plan_problem` made for `problem`.

    With `sensitivity` it also plans for other circumstances: a search each.
    """
    plan = plans[0]
    policy = policy_of(problem)
    steps = [_step(problem, plan, i, policy) for i in range(len(problem.batches))]
    return Explanation(
        plans=tuple(plans),
        costs=tuple(
            (f"{m.module} tp{m.parallel.tp}", problem.cost.table(m.module, m.modes[-1]).source) for m in plan.modules
        ),
        terms=problem.terms(plan),
        stages=tuple(_stages(problem, plan, steps)),
        time=_time(problem, plan, steps),
        limits=plan_limits(problem, plan, _largest_tokens(plan, steps)),
        variations=(
            Variation("current", problem.cluster.num_processes, _num_samples(problem), plan),
            *(_variations(problem, say) if sensitivity else ()),
        ),
    )


def policy_of(problem: Problem) -> str:
    """What schedules the batches: other trainers, whose rules a problem may have, do not look at them."""
    return "balanced" if problem.space.rules is None else "arrival"


def save_plan_picture(problem: Problem, plan: Plan, source: str, path: Path) -> None:
    """Draws `typical_steps`, one below the other.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    save_plan_steps(plan, typical_steps(problem, plan), source, path)


def typical_steps(problem: Problem, plan: Plan) -> Sequence[SimulatedStep]:
    """One sampled batch in arrival order and as the plan runs it.

    The batch is the one whose gain is the median, of an even number the smaller of both.
    """
    policies = list(dict.fromkeys(("arrival", policy_of(problem))))
    found = [[_step(problem, plan, i, policy) for policy in policies] for i in range(len(problem.batches))]
    found.sort(key=lambda steps: steps[0].pipeline_s / max(steps[-1].pipeline_s, 1e-12))
    return found[(len(found) - 1) // 2]


def _step(problem: Problem, plan: Plan, index: int, policy: str) -> _Step:
    of_batch = problem.batches[index], problem.cost, problem.cluster.max_concurrency, problem.batch_items[index]
    job = StepJob(plan, *of_batch)
    assignment = job.assign(policy, thorough(problem))
    return _Step(policy, *job.judge.spans(assignment), job, assignment)


def _stages(problem: Problem, plan: Plan, steps: Sequence[_Step]) -> Iterator[StageUse]:
    nodes = step_nodes(plan)
    busy_s = np.mean([step.busy_s for step in steps], axis=0)
    pipeline_s = statistics.fmean(step.pipeline_s for step in steps)
    for pipe in plan.pipes:
        for stage in range(pipe.parallel.pp):
            own = [i for i, (module, s, _) in enumerate(nodes) if (module, s) == (pipe.module, stage)]
            mean_s = float(busy_s[own].mean())
            yield StageUse(
                stage=stage_name(plan, pipe.module, stage),
                layers=stage_layers(plan, pipe.module, stage),
                num_gpus=pipe.parallel.group_size * pipe.parallel.dp,
                busy_s=mean_s,
                idle_s=pipeline_s - mean_s,
                memory_bytes=pipe.stage_memory_bytes[stage],
                usable_bytes=problem.usable_bytes,
            )


def _time(problem: Problem, plan: Plan, steps: Sequence[_Step]) -> TimeUse:
    gpus = np.array([plan.module(module).parallel.group_size for module, _, _ in step_nodes(plan)], dtype=float)
    whole_s = problem.cluster.num_processes * sum(step.pipeline_s + plan.sync_s for step in steps)
    busy_s = sum(float(step.busy_s @ gpus) for step in steps)
    pipeline_s = float(gpus.sum()) * sum(step.pipeline_s for step in steps)
    even_s = [_even_s(step) for step in steps]
    even_whole_s = problem.cluster.num_processes * sum(s + plan.sync_s for s in even_s)
    return TimeUse(
        busy_frac=busy_s / whole_s,
        idle_frac=(pipeline_s - busy_s) / whole_s,
        sync_frac=float(gpus.sum()) * len(steps) * plan.sync_s / whole_s,
        unused_frac=1.0 - plan.num_processes / problem.cluster.num_processes,
        even_idle_frac=float(np.maximum(0.0, (gpus.sum() * sum(even_s) - busy_s) / even_whole_s)),
    )


def _even_s(step: _Step) -> float:
    """The pipeline if all microbatches of a stage, on all of its ranks, took their mean; NaN where cores are shared."""
    judge = step.job.judge
    if judge.max_concurrency is not None:
        return float("nan")
    work, shape = judge.work(step.assignment), judge.shape

    def even(values: Floats) -> Floats:
        found = np.empty_like(values)
        for pipe, stage in set(zip(shape.node_pipe.tolist(), shape.node_stage.tolist(), strict=True)):
            own = (shape.node_pipe == pipe) & (shape.node_stage == stage)
            found[own] = values[own].mean()
        return found

    alike = replace(
        work,
        is_active=np.ones_like(work.is_active),
        forward_s=even(work.forward_s),
        backward_s=even(work.backward_s),
        forward_delay_s=even(work.forward_delay_s),
        backward_delay_s=even(work.backward_delay_s),
    )
    return makespan_s(shape, alike)


def _largest_tokens(plan: Plan, steps: Sequence[_Step]) -> dict[str, int]:
    """Per module, tokens of the largest microbatch on one replica."""
    return {
        m.module: max(
            int(bucket_tokens(s.job.items[m.module], s.assignment, plan.num_microbatches, m.parallel.dp).max(initial=0))
            for s in steps
        )
        for m in plan.modules
    }


def _variations(problem: Problem, say: Say) -> Iterator[Variation]:
    at = Meter(say)
    for name, changed, note in _changed_problems(problem):
        say(f"planning with {name}")
        num_gpus, num_samples = changed.cluster.num_processes, _num_samples(changed)
        try:
            plan = plan_problem(changed, policy=policy_of(changed), at=at)[0]
        except (InfeasiblePlanError, ConfigError) as error:
            yield Variation(name, num_gpus, num_samples, None, error.what)
        else:
            notes = [note] * bool(note) + ["not every sample fits"] * bool(samples_beyond(changed, plan))
            yield Variation(name, num_gpus, num_samples, plan, "; ".join(notes))


def _changed_problems(problem: Problem) -> Iterator[tuple[str, Problem, str]]:
    """(name, problem, note)."""
    cluster, batches = problem.cluster, problem.batches

    def on(**changes: Any) -> Problem:
        return replace(problem, cluster=replace(cluster, **changes))

    guessed = "links between nodes are not profiled" if not any(x.num_nodes > 1 for x in problem.cost.links) else ""
    if cluster.num_nodes > 1:
        yield "one node fewer", on(num_nodes=cluster.num_nodes - 1), guessed * (cluster.num_nodes > 2)
    elif cluster.num_processes_per_node > 1:
        yield "half the node", on(num_processes_per_node=cluster.num_processes_per_node // 2), ""
    yield "one node more", on(num_nodes=cluster.num_nodes + 1), guessed
    halves = tuple(batch[: len(batch) // 2] for batch in batches)
    if all(halves):
        yield "half the batch", replace(problem, batches=halves, global_batch_size=problem.global_batch_size // 2), ""
    doubled = tuple((*batch, *batches[(i + 1) % len(batches)]) for i, batch in enumerate(batches))
    yield "double the batch", replace(problem, batches=doubled, global_batch_size=2 * problem.global_batch_size), ""
    yield "double the memory", on(memory_per_process_bytes=2 * cluster.memory_per_process_bytes), ""


def _num_samples(problem: Problem) -> float:
    return statistics.fmean(len(batch) for batch in problem.batches)
