"""Which sizes of items the predicted seconds of every microbatch are of: what measured seconds are held against.

The uncorrected seconds of a module on a stage are shared out over its items in proportion to what each adds, fixed
costs pro rata. So a microbatch's seconds under corrections by size are the sum over buckets of factor times share,
which is what `StepEvaluator` predicts with and what an estimator of the factors has to invert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import CostModel, Floats, StageKind, stage_kind
from dflop.records import ModulePlan, Plan, SampleShape, StepPlan
from dflop.schedule.assignment import assignment_of
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import ModuleItems, Owner, item_weights, module_items, owner_cells
from dflop.simulate.step import Node, step_nodes


@dataclass(frozen=True, slots=True)
class BucketSeconds:
    """Uncorrected forward and backward seconds of every microbatch on every node, by size of item."""

    nodes: tuple[Node, ...]
    """As ranks measure them: of a colocated plan the LLM's."""
    seconds: Mapping[str, Floats]
    """Per module `[nodes, microbatches, buckets]`; zeros where it has no work."""

    def of(self, node: Node) -> list[dict[str, Floats]]:
        """Per microbatch of a node, and module with work there, `[buckets]`."""
        at = self.nodes.index(node)
        rows = {module: seconds[at] for module, seconds in self.seconds.items()}
        num_slots = len(next(iter(rows.values())))
        return [{module: row[k] for module, row in rows.items() if row[k].any()} for k in range(num_slots)]


def bucket_seconds(
    plan: Plan,
    step_plan: StepPlan,
    batch: Sequence[SampleShape],
    cost: CostModel,
    edges: Mapping[str, tuple[int, ...]],
) -> BucketSeconds:
    """Uncorrected forward and backward seconds of every microbatch on every node, by size of item.

    Args:
        plan: The layout `step_plan` was made for.
        step_plan: Owners.
        batch: The samples of `step_plan.sample_index`, in that order.
        cost: Its corrections are left out.
        edges: Per module, tokens at which the next bucket begins, ascending; one bucket where absent.
    """
    plain, nodes = cost.uncorrected().extrapolating(), step_nodes(plan)
    position = {node: i for i, node in enumerate(nodes)}
    seconds: dict[str, Floats] = {}
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    judge, assignment = StepEvaluator(plan, items, plain), assignment_of(plan, step_plan)
    loads = judge.loads(assignment)
    for m in plan.modules:
        own_edges = edges.get(m.module, ())
        found = seconds[m.module] = np.zeros((len(nodes), plan.num_microbatches, len(own_edges) + 1))
        by_kind: dict[StageKind, Floats] = {}
        for stage, taken_s in enumerate(judge.part_seconds(m, loads[m.module], assignment)):
            kind = stage_kind(m, stage)
            if kind not in by_kind:
                owner = step_plan.of(m.module).owner
                by_kind[kind] = _stage_buckets(m, kind, items[m.module], owner, taken_s.sum(axis=0), plain, own_edges)
            for rank in range(m.parallel.dp):
                found[position[plan.grid_of(m.module)[-1].module, stage, rank]] = by_kind[kind][:, rank]
    return BucketSeconds(nodes, seconds)


def _stage_buckets(
    part: ModulePlan, kind: StageKind, items: ModuleItems, owner: Owner, taken_s: Floats, cost: CostModel,
    edges: tuple[int, ...],
) -> Floats:  # fmt: skip
    """`[microbatches, dp, buckets]` of the seconds `[microbatches, dp]` of a module on its stages of one kind."""
    dp, num_buckets = part.parallel.dp, len(edges) + 1
    cell = owner_cells(owner, len(items.sample))
    bucket = cell * num_buckets + np.searchsorted(edges, items.num_tokens, side="right")
    weights_s = item_weights(part, kind, items, cost)
    shares = np.bincount(bucket, weights_s, len(owner) * dp * num_buckets).reshape(len(owner), dp, num_buckets)
    total = shares.sum(axis=-1)
    scale = np.divide(taken_s, total, out=np.zeros(total.shape), where=total > 0)
    found: Floats = shares * scale[..., np.newaxis]
    return found
