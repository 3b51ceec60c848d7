"""The predicted half of a step that ran: the simulator, run again on the seconds that were predicted when it did.

Ranks record what was predicted for each of their microbatches, not when that would have been. When is what the 1F1B
order and the step plan make of it, so the simulator that made the prediction says it once more. What messages were
expected to take is not recorded, so here they take no time: the pipeline ends up to as much earlier than the
`predicted_step_s` of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.records import Plan, StepObservation, StepPlan
from dflop.schedule.assignment import assignment_of
from dflop.schedule.evaluate import feeding
from dflop.simulate.kernel import Bools, StepShape, StepWork, run_step, step_shape
from dflop.simulate.order import Phase, actions, num_stages_after, stage_links
from dflop.simulate.step import Floats, Node, meeting_ranks, on_shared_cores, slowest, step_nodes

Op = tuple[Node, int, Phase]
"""(node, microbatch, `F` or `B`)."""


@dataclass(frozen=True, slots=True)
class PredictedOp:
    """Forward or backward of one microbatch on one node of the plan."""

    node: Node
    microbatch: int
    phase: Phase
    start_s: float
    """From the start of the step."""
    duration_s: float
    """Where processes share cores longer than the seconds of compute that were predicted."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """When everything in a step would have run, had the predictions been right."""

    ops: Mapping[Node, Sequence[PredictedOp]]
    """By node, in the order in which they run."""
    waits: tuple[tuple[Op, Op], ...]
    """(what sends, what waits for it), between nodes."""
    pipeline_s: float

    def of(self, node: Node) -> Sequence[PredictedOp]:
        """What a node does, in order."""
        return self.ops.get(node, ())


def fits(plan: Plan, step_plan: StepPlan) -> bool:
    """Whether a step plan was made for a layout like this one."""
    owners = {work.module: work.owner for work in step_plan.work}
    return step_plan.num_microbatches == plan.num_microbatches and all(
        len(owners.get(m.module, ())) == plan.num_microbatches
        and all(len(ranks) == m.parallel.dp for ranks in owners[m.module])
        for m in plan.modules
    )


def plan_that_ran(step_plans: Iterable[StepPlan], predicted_step_s: float) -> StepPlan | None:
    """The one of a step's plans that its ranks were sent: a step that was done again has several. None without any."""
    found = list(step_plans)
    same = [plan for plan in found if plan.predicted_step_s == predicted_step_s]
    ran = same or found
    return ran[-1] if ran else None


def simulate_again(
    plan: Plan, step_plan: StepPlan, seen: Iterable[StepObservation], max_concurrency: int | None = None
) -> PredictedStep | None:
    """The step as it was predicted; None where no prediction was recorded, or not of every node of the plan.

    Args:
        plan: Layout that the step ran under.
        step_plan: Of the step.
        seen: What its ranks recorded; those of a tensor-parallel group were predicted the same.
        max_concurrency: Processes that can compute at once; None: each has its device.
    """
    seconds = _predicted_seconds(plan, seen) if fits(plan, step_plan) else None
    if seconds is None:
        return None
    nodes, shape, m = step_nodes(plan), step_shape(plan), plan.num_microbatches
    owner = {work.module: work.owner for work in step_plan.work}
    is_active = np.array([[bool(owner[module][k][rank]) for k in range(m)] for module, _, rank in nodes])
    samples = {work.module: np.array(work.item_sample, dtype=np.int64) for work in step_plan.work}
    feeds, nothing = feeding(plan, shape, assignment_of(plan, step_plan), samples), np.zeros(is_active.shape)
    start_s, end_s = run_step(shape, StepWork(is_active, seconds[..., 0], seconds[..., 1], nothing, nothing, feeds))
    if max_concurrency is not None and max_concurrency < plan.num_processes:
        tps = np.array([plan.module(module).parallel.group_size for module, _, _ in nodes])
        start_s, end_s = on_shared_cores(start_s, end_s, tps[:, np.newaxis, np.newaxis], max_concurrency)
    spans = np.stack([start_s, end_s - start_s], axis=-1).tolist()
    ops = {
        node: [
            PredictedOp(node, k, phase, *spans[i][k][phase == "B"])
            for phase, k in actions(m, num_stages_after(plan, *node[:2]))
            if is_active[i, k]
        ]
        for i, node in enumerate(nodes)
    }
    return PredictedStep(ops, tuple(_waits(plan, shape, is_active, feeds)), float(end_s.max(initial=0.0)))


def _waits(plan: Plan, shape: StepShape, is_active: Bools, feeds: Bools) -> Iterator[tuple[Op, Op]]:
    """Between stages of a pipe rank by rank, and from an encoder to the LLM where its rows go."""
    active, links = dict(zip(step_nodes(plan), is_active, strict=True)), iter(range(len(shape.pipes) - 1))
    for before, behind in stage_links(plan):
        if before[0] == behind[0]:
            for rank in range(plan.module(before[0]).parallel.dp):
                for k in np.flatnonzero(active[*behind, rank]).tolist():
                    yield from _exchange((*before, rank), (*behind, rank), k)
            continue
        p, dps = next(links), [plan.module(stage[0]).parallel.dp for stage in (before, behind)]
        for k, *ranks in np.argwhere(feeds[shape.link_start[p] : shape.link_start[p + 1]].reshape(-1, *dps)).tolist():
            yield from _exchange((*before, ranks[0]), (*behind, ranks[1]), k)


def _exchange(before: Node, behind: Node, k: int) -> Iterator[tuple[Op, Op]]:
    """A microbatch's rows go from one node to another, gradients come back."""
    yield (before, k, "F"), (behind, k, "F")
    yield (behind, k, "B"), (before, k, "B")


def _predicted_seconds(plan: Plan, seen: Iterable[StepObservation]) -> Floats | None:
    """`[nodes, microbatches, 2]` as the simulator takes them; ranks that meet take as long as the slowest."""
    found: dict[Node, Floats] = {}
    for rank in seen:
        of_rank = np.zeros((plan.num_microbatches, 2))
        for span in rank.spans:
            if not 0 <= span.microbatch < plan.num_microbatches:
                return None
            of_rank[span.microbatch] = (span.predicted_forward_s, span.predicted_backward_s)
        found[rank.module, rank.stage, rank.dp_rank] = of_rank
    nodes = step_nodes(plan)
    if set(found) != set(nodes) or not any(of.any() for of in found.values()):
        return None
    seconds, first = np.stack([found[node] for node in nodes], axis=-1), 0
    for pipe in plan.pipes:
        for _ in range(pipe.parallel.pp):
            own = slice(first, first := first + pipe.parallel.dp)
            seconds[..., own] = slowest(seconds[..., own], meeting_ranks(plan, pipe.module))
    return np.moveaxis(seconds, -1, 0)
