"""What an expert of Megatron-LM runs: one chain whose layers are cut by cost, samples packed by tokens.

The plan may use what that trainer has and this engine lacks. Recomputation of MLPs alone is a matter of costs: what a
layer keeps, and the MLP's forward pass once more (`--recompute-modules mlp` or `moe`). Models with experts are planned
with expert parallelism, too: parallel folding (arXiv 2504.14960) lays groups that share experts over tensor, context
and data parallel ranks of a node, and the distributed optimizer shards the rest. Its context parallelism is charged as
ours is, which sends no more than a ring does.
"""

from __future__ import annotations

import dataclasses

from dflop.compare.experts.expert_plan import ExpertPlan
from dflop.cost import curve
from dflop.cost.identity import bytes_per_value, with_table_id
from dflop.cost.model import CostModel
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import has_table
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem, SearchSpace
from dflop.records import LLM, CostTable, LayerKind, ModuleSpec, RunMode

POLICY = "token_lpt"
NOMINEES = 16


def expert_plan(problem: Problem) -> ExpertPlan:
    """The faster one of the best plans with whole layers recomputed and with MLPs alone, where memory asks for it.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: neither has a plan that fits.
    """
    return _fastest(problem, dataclasses.replace(problem.space, cps=(1,)))


def expert_parallel_plan(problem: Problem) -> ExpertPlan | None:
    """The same at any degree of expert and context parallelism; None for a model without experts, raises as above."""
    eps = tuple(ep for ep in problem.spec(LLM).ep_choices if ep > 1)
    if not eps:
        return None
    return _fastest(
        problem, dataclasses.replace(problem.space, cps=None, whole_samples="", eps=eps, folds_experts=True)
    )


def _fastest(problem: Problem, space: SearchSpace) -> ExpertPlan:
    found, error = [], None
    space = dataclasses.replace(space, share_ranks=(True,), shard_parameters=(False,), rules=None)
    for cost in (problem.cost, recomputing_mlps(problem)):
        its = dataclasses.replace(problem, cost=cost, space=space)
        try:
            found.append(ExpertPlan(plan_problem(its, top=NOMINEES, policy=POLICY)[0], cost, POLICY))
        except InfeasiblePlanError as nothing:
            error = nothing
    if not found:
        assert error is not None
        raise error
    return min(found, key=lambda each: each.plan.predicted_step_s)


def recomputing_mlps(problem: Problem) -> CostModel:
    """Costs where MLPs alone are recomputed, in place of whole layers."""
    cost, tables = problem.cost, []
    for spec in problem.specs:
        for tp in problem.tps(spec):
            tables.append(plain := cost.table(spec.module, RunMode(tp)))
            if has_table(cost, spec.module, RunMode(tp, recompute=True)):
                tables.append(_mlps(plain, spec))
    return CostModel(
        tables,
        cost.corrections,
        specs=problem.specs,
        links=cost.links,
        extrapolate=True,
    )


def _mlps(plain: CostTable, spec: ModuleSpec) -> CostTable:
    """Layers that keep nothing inside their MLPs and run them again."""
    if not plain.trains_layers:
        return dataclasses.replace(plain, recompute=True)
    inside = bytes_per_value(plain.dtype) * spec.mean(lambda kind: _values_inside(kind, spec.hidden_size)) / plain.tp
    again = dataclasses.replace(curve.combine([(1.0, plain.forward_s)], [0.0]), layer_per_sq_token=0.0)
    matrices = spec.mean(lambda kind: kind.mlp_width * (2 + kind.is_gated_mlp))
    part = spec.hidden_size * matrices / spec.mean(lambda kind: kind.num_used_params)
    kept = dataclasses.replace(
        plain.activation_bytes, layer_per_token=max(plain.activation_bytes.layer_per_token - inside, 0.0)
    )
    return with_table_id(
        dataclasses.replace(
            plain,
            recompute=True,
            backward_s=curve.combine([(1.0, plain.backward_s), (part, again)]),
            activation_bytes=kept,
        )
    )


def _values_inside(kind: LayerKind, hidden_size: int) -> float:
    """Values an MLP keeps per token; experts keep rows in, out and weighted, and four of their widths, as in eager."""
    if not kind.num_experts:
        return kind.num_mlp_tensors * kind.mlp_width
    return 3 * kind.num_active_experts * hidden_size + 4 * kind.mlp_width
