"""The predicted half of a step that ran: the simulator, run again on the seconds that were predicted when it did.

Ranks record what was predicted for each of their microbatches, not when that would have been. When is what the 1F1B
order and the step plan make of it, so the simulator that made the prediction says it once more. What messages were
reckoned to take is not recorded, so here they take no time: the pipeline ends up to as much earlier than the
`predicted_step_s` of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.records import LLM, Plan, StepObservation, StepPlan
from dflop.simulate.events import simulate
from dflop.simulate.pipeline_order import Phase
from dflop.simulate.step import PHASES, Node, on_shared_cores, op_id, step_graph, step_nodes

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
        max_concurrency: Processes that can compute at once; None: each has a device of its own.
    """
    seconds = _predicted_seconds(plan, seen) if fits(plan, step_plan) else None
    if seconds is None:
        return None
    m, nodes = plan.num_microbatches, step_nodes(plan)
    owner = {work.module: work.owner for work in step_plan.work}
    ops = {
        op_id(m, i, k, phase): (node, k, phase)
        for i, node in enumerate(nodes)
        for k in range(m)
        if owner[node[0]][k][node[2]]
        for phase in PHASES
    }
    graph = step_graph(plan, step_plan.work, seconds)
    found = simulate(graph)
    start_s, end_s = np.array(found.start_s), np.array(found.end_s)
    if max_concurrency is not None and max_concurrency < plan.num_processes:
        tps = np.repeat([plan.module(module).parallel.tp for module, _, _ in nodes], 2 * m)
        start_s, end_s = on_shared_cores(start_s, end_s, tps, max_concurrency)
    in_order = [op for own in graph.node_ops for op in own if op in ops]
    of_node = defaultdict[Node, list[PredictedOp]](list)
    for op in in_order:
        node, k, phase = ops[op]
        of_node[node].append(PredictedOp(node, k, phase, float(start_s[op]), float(end_s[op] - start_s[op])))
    return PredictedStep(
        of_node,
        tuple((ops[before], ops[op]) for op in in_order for before in graph.depends_on[op] if before in ops),
        float(end_s.max(initial=0.0)),
    )


def _predicted_seconds(plan: Plan, seen: Iterable[StepObservation]) -> dict[Node, list[tuple[float, float]]] | None:
    """As `step_graph` takes them; an inline plan's are all told by the LLM, for a stage was predicted as a whole."""
    nothing = [(0.0, 0.0)] * plan.num_microbatches
    found: dict[Node, list[tuple[float, float]]] = {}
    for rank in seen:
        of_rank = list(nothing)
        for span in rank.spans:
            if not 0 <= span.microbatch < plan.num_microbatches:
                return None
            of_rank[span.microbatch] = (span.predicted_forward_s, span.predicted_backward_s)
        found[rank.module, rank.stage, rank.dp_rank] = of_rank
    if set(found) != set(step_nodes(plan)) or not any(pair > (0.0, 0.0) for of in found.values() for pair in of):
        return None
    if plan.is_inline:
        found |= {(m.module, *node[1:]): nothing for m in plan.modules if m.module != LLM for node in step_nodes(plan)}
    return found
