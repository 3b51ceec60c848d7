"""What levers of memory are worth to our plans: `python -m tests.bench.suite --without LEVER`.

Planned with and without it, on fewer batches and nominees than a suite's, where the plan uses it; a ratio is that of
simulated steps on these batches. A lever is withheld as what layers or the loss would keep, or as a choice of the plan.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflop.cost.identity import with_table_id
from dflop.cost.model import CostModel
from dflop.errors import InfeasiblePlanError
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, CostTable, ModuleSpec, Plan
from dflop.report.tables import layout_text
from dflop.units import seconds
from tests.bench.cases import CASES, make_setting
from tests.bench.mixtures import MIXTURES

NUM_BATCHES, NOMINEES = 2, 16
LOGIT_BYTES = 12
"""Where cross entropy is taken of all logits in float32 (docs/appendix.md)."""


@dataclass(frozen=True)
class Lever:
    """A lever and how to do without it."""

    is_used: Callable[[Plan], bool]
    more: Callable[[ModuleSpec, CostTable], tuple[float, float]] | None = None
    """Bytes that a table keeps without it, of a layer's token and of an item of the edge."""
    space: Mapping[str, Any] = field(default_factory=dict)

    def withheld(self, problem: Problem) -> Problem:
        """The problem without it."""
        space = dataclasses.replace(problem.space, **self.space)
        old, tables = problem.cost, list(problem.cost.tables)
        for i, table in enumerate(tables if self.more else ()):
            assert self.more is not None
            per_token, per_item = self.more(problem.spec(table.module), table)
            kept = table.activation_bytes
            kept = dataclasses.replace(
                kept, layer_per_token=kept.layer_per_token + per_token, edge_per_item=kept.edge_per_item + per_item
            )
            tables[i] = with_table_id(dataclasses.replace(table, activation_bytes=kept))
        cost = CostModel(tables, old.corrections, specs=problem.specs, links=old.links, extrapolate=True)
        return dataclasses.replace(problem, cost=cost, space=space)


def _unfused(spec: ModuleSpec, table: CostTable) -> tuple[float, float]:
    """Norms keep a copy in float32 and what they make, MLPs what their activation and product make."""
    norms = 8.0 * spec.hidden_size * (spec.module == LLM)
    inside = 2.0 * spec.mean(lambda kind: kind.mlp_width * (1 + kind.is_gated_mlp))
    return (not table.recompute) * (norms + inside) / table.tp, 0.0


def _whole_tokens(spec: ModuleSpec, table: CostTable) -> tuple[float, float]:
    """Every rank keeps the norms and residuals of all tokens."""
    outside = 2.0 * (spec.hidden_size if table.recompute else spec.mean(lambda kind: kind.num_norm_values))
    return outside * (1 - 1 / table.tp), 0.0


LEVERS = {
    "chunked-loss": Lever(lambda _: True, lambda spec, table: (0.0, LOGIT_BYTES * spec.vocab_size / table.tp)),
    "fused-layers": Lever(lambda _: True, _unfused),
    "sequence-parallelism": Lever(lambda plan: plan.module(LLM).parallel.tp > 1, _whole_tokens),
    "recomputation": Lever(lambda plan: any(m.recompute for m in plan.modules), space={"recompute": (False,)}),
    "zero-1": Lever(lambda plan: plan.module(LLM).sharding == "ZeRO-1", space={"shard_optimizer": False}),
    "fsdp2": Lever(lambda plan: plan.module(LLM).parameter_shards > 1, space={"shard_parameters": (False,)}),
}


def print_without(names: Sequence[str]) -> None:
    """Per model and data our plan, and per lever how many times as long a step takes without it."""
    for mixture, case in itertools.product(MIXTURES.values(), CASES):
        problem = make_setting(case, mixture, num_unseen=1).problem
        problem = dataclasses.replace(problem, batches=problem.batches[:NUM_BATCHES])
        best = plan_problem(problem, top=NOMINEES)[0]
        print(f"{case.name}, {mixture.name}: {layout_text(best)}, {seconds(best.predicted_step_s)}", flush=True)
        for name in (name for name in names if LEVERS[name].is_used(best)):
            try:
                without = plan_problem(LEVERS[name].withheld(problem), top=NOMINEES)[0]
            except InfeasiblePlanError:
                found = "none fits"
            else:
                found = f"{without.predicted_step_s / best.predicted_step_s:.3f}x: {layout_text(without)}"
            print(f"  {name} {found}", flush=True)
