"""What an expert of Megatron-LM runs: one chain whose layers are cut by cost, samples packed by tokens.

The plan may use what that trainer has and this engine lacks: sequence parallelism (Korthikanti et al., arXiv
2205.05198) in encoders, too, under which tensor-parallel ranks share what a layer keeps outside its matrices, and
recomputation of MLPs alone. Both are costs here: what a layer keeps, and the MLP's forward pass once more. Messages
stay, for a scatter and a gather are an all-reduce in two halves; an encoder's norms keep their time, and what is kept
outside the layers its size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from dflop.cost import curve
from dflop.cost.activations import layer_bytes_per_token
from dflop.cost.identity import bytes_per_value, with_table_id
from dflop.cost.model import CostModel
from dflop.cost.towers import trains_layers
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import has_table
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import CostTable, ModuleSpec, Plan

POLICY = "token_lpt"
NOMINEES = 16


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """A plan with the costs that it was made with."""

    plan: Plan
    cost: CostModel


def expert_plan(problem: Problem) -> ExpertPlan:
    """The faster one of the best plans with whole layers recomputed and with MLPs alone, where memory asks for it.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: neither has a plan that fits.
    """
    found, error = [], None
    for whole_layers in (True, False):
        cost = expert_cost(problem, whole_layers=whole_layers)
        space = dataclasses.replace(problem.space, layouts=("inline",), shard_parameters=(False,), rules=None)
        its = dataclasses.replace(problem, cost=cost, space=space)
        try:
            found.append(ExpertPlan(plan_problem(its, top=NOMINEES, policy=POLICY)[0], cost))
        except InfeasiblePlanError as nothing:
            error = nothing
    if not found:
        assert error is not None
        raise error
    return min(found, key=lambda each: each.plan.predicted_step_s)


def expert_cost(problem: Problem, *, whole_layers: bool) -> CostModel:
    """Costs under sequence parallelism; what is recomputed are whole layers, or MLPs alone."""
    tables = [
        table
        for spec in problem.specs
        for tp in problem.tps(spec)
        for table in _tables(problem.cost, spec, tp, whole_layers=whole_layers)
    ]
    return CostModel(
        tables,
        problem.cost.corrections,
        frozen={table.module for table in tables if table.is_frozen},
        specs=problem.specs,
        links=problem.cost.links,
        extrapolate=True,
    )


def _tables(cost: CostModel, spec: ModuleSpec, tp: int, *, whole_layers: bool) -> Iterator[CostTable]:
    plain = cost.table(spec.module, tp, False)
    yield _sharing_tokens(plain, spec, recompute=False)
    if has_table(cost, spec.module, tp, True):
        yield (
            _sharing_tokens(cost.table(spec.module, tp, True), spec, recompute=True)
            if whole_layers
            else _mlps(plain, spec)
        )


def _sharing_tokens(table: CostTable, spec: ModuleSpec, *, recompute: bool) -> CostTable:
    """Every rank keeps its part of the tokens of what all of them kept."""
    whole, _ = layer_bytes_per_token(spec, is_frozen=table.is_frozen, recompute=recompute)
    return _keeping(table, table.activation_bytes.layer_per_token - whole * (1 - 1 / table.tp))


def _mlps(plain: CostTable, spec: ModuleSpec) -> CostTable:
    """Layers that keep nothing inside their MLPs and run them again."""
    shared = _sharing_tokens(plain, spec, recompute=False)
    if not trains_layers(plain):
        return dataclasses.replace(shared, recompute=True)
    inside = bytes_per_value(plain.dtype) * spec.num_mlp_tensors * spec.mlp_width / plain.tp
    again = dataclasses.replace(curve.combine([(1.0, plain.forward_s)], [0.0]), layer_per_sq_token=0.0)
    part = spec.hidden_size * spec.mlp_width * (2 + spec.is_gated_mlp) / spec.num_layer_params
    table = dataclasses.replace(
        shared, recompute=True, backward_s=curve.combine([(1.0, plain.backward_s), (part, again)])
    )
    return _keeping(table, shared.activation_bytes.layer_per_token - inside)


def _keeping(table: CostTable, bytes_per_token: float) -> CostTable:
    kept = dataclasses.replace(table.activation_bytes, layer_per_token=max(bytes_per_token, 0.0))
    return with_table_id(dataclasses.replace(table, activation_bytes=kept))
