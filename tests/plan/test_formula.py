from collections.abc import Sequence

import numpy as np
import pytest

from dflop.cost.link_costs import ALL_REDUCE
from dflop.cost.model import has_edge
from dflop.plan.columns import Found, best_of, combined
from dflop.plan.drafts import draft, fits
from dflop.plan.formula import FormulaTable, formula_table, module_table
from dflop.plan.grid_choice import GridChoice
from dflop.plan.space import Problem
from dflop.records import LLM
from tests.builders import make_link
from tests.plan.problems import make_problem


def every_choice(table: FormulaTable) -> list[Found]:
    """(J, choice) of every feasible choice, best first."""
    choices = combined(table, [np.arange(len(m.candidates)) for m in table.modules])
    return best_of(table, choices, len(choices)) if len(choices) else []


def formula_by_hand(problem: Problem, num_microbatches: int, grids: Sequence[GridChoice]) -> float:
    """J of one layout, stage by stage and scenario by scenario."""
    steps = []
    for s in range(len(problem.batches)):
        taus, fills = {}, {}
        for c in grids:
            ((name, layers),) = c.layers.items()
            loads, key = problem.loads[name], {"tp": c.parallel.tp, "recompute": c.num_recomputed > 0}
            stages = []
            for load in (loads.per_microbatch(num_microbatches * c.parallel.dp)[:, s], loads.longest[:, s]):
                for stage, num_layers in enumerate(layers):
                    edge = has_edge(layers, stage)
                    stages.append(
                        sum(problem.cost.module_seconds(name, *load, num_layers=num_layers, edge=edge, **key))
                    )
            average, lump = stages[: c.parallel.pp], stages[c.parallel.pp :]
            taus[name] = max(average)
            fills[name] = sum(max(a, b) for a, b in zip(average, lump, strict=True))
        encoders_s = max((fill for name, fill in fills.items() if name != LLM), default=0.0)
        steps.append(encoders_s + fills[LLM] + (num_microbatches - 1) * max(taus.values()))
    return sum(steps) / len(steps)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_table_holds_the_formula_of_every_layout(num_microbatches):
    problem = make_problem("vision", "audio", num_processes=6, tps=(1, 2))
    table = formula_table(problem, num_microbatches)
    choices = [choice for _, choice in every_choice(table)]
    assert len({m.candidates.pp.max() for m in table.modules}) > 1
    for choice in choices[:: max(1, len(choices) // 20)]:
        grids = table.grids(choice)
        plan = draft(problem, num_microbatches, grids, table.objective(choice))
        expected = formula_by_hand(problem, num_microbatches, grids) + plan.sync_s
        assert table.objective(choice) == pytest.approx(expected, rel=1e-12)


def test_synchronisation_and_optimizer_are_part_of_the_formula_except_for_frozen_modules():
    link = make_link(ALL_REDUCE, 2, 1, 0.1, 1e9)
    plain = make_problem("vision", num_processes=4)
    slow = make_problem("vision", num_processes=4, links=[link], optimizer_s_per_param=1e-8)
    frozen = make_problem("vision", num_processes=4, links=[link], optimizer_s_per_param=1e-8, frozen=True)
    tables = [module_table(p, p.specs[0], 2) for p in (plain, slow, frozen)]
    assert not tables[0].sync_s.any()
    assert not tables[2].sync_s.any()
    # 4 layers of a million parameters and an edge of two; states are shared out: a sum in 32 bit, a broadcast in 16.
    by_dp = dict(zip(tables[1].candidates.dp.tolist(), tables[1].sync_s.tolist(), strict=True))
    assert by_dp[1] == pytest.approx(6e6 * 1e-8)
    assert by_dp[2] == pytest.approx(6e6 * 1e-8 / 2 + 0.1 + (4 + 2) / 2 * 6e6 / 1e9)


@pytest.mark.parametrize("memory_mb", [180, 250])
def test_feasible_choices_are_the_drafts_that_fit(memory_mb):
    problem = make_problem("vision", num_processes=5, memory_bytes=memory_mb * 10**6, recompute=(False,))
    table = formula_table(problem, 3)
    chosen = {str(table.grids(c)) for _, c in every_choice(table)}
    roomy = make_problem("vision", num_processes=5, recompute=(False,))
    every = formula_table(roomy, 3)
    fitting = {
        str(grids)
        for _, choice in every_choice(every)
        for grids in [every.grids(choice)]
        if fits(problem, draft(problem, 3, grids, 0.0))
    }
    assert chosen == fitting
    assert 0 < len(chosen) < len(every_choice(every))


def test_recomputation_is_kept_only_where_it_buys_something():
    roomy = make_problem("vision", num_processes=4)
    assert not any(m.candidates.recompute.any() for m in formula_table(roomy, 4).modules)
    tight = make_problem("vision", num_processes=5, memory_bytes=130 * 10**6)
    vision, llm = formula_table(tight, 3).modules
    assert vision.candidates.recompute.any()
    assert llm.candidates.recompute.any()
    degrees = llm.candidates.content[:, :3].tolist()
    assert len({tuple(d) for d in degrees}) == len(degrees)  # an LLM that fits without never comes with
    for d in {tuple(d) for d in vision.candidates.content[:, :3].tolist()}:
        same = (vision.candidates.content[:, :3] == d).all(axis=1)
        deepest = vision.max_llm_pp[same][np.argsort(vision.candidates.recompute[same])]
        assert (np.diff(deepest) > 0).all()
