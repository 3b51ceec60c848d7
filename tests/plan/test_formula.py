from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflop.cost.link_costs import ALL_REDUCE
from dflop.cost.model import has_edge
from dflop.plan.candidates import Candidate, Candidates
from dflop.plan.drafts import fits, split_draft
from dflop.plan.enumerate import best_choices
from dflop.plan.formula import FormulaTable, ModuleTable, formula_table, module_table
from dflop.plan.milp import solve_milp
from dflop.plan.space import Problem
from dflop.records import LLM
from tests.builders import make_link, make_specs
from tests.plan.problems import make_problem


def random_table(seed: int, num_encoders: int, *, num_processes: int = 12, size: int = 9) -> FormulaTable:
    """Candidates of every degree up to 3, a random part of them, at random costs."""
    rng = np.random.default_rng(seed)
    every = np.array(list(itertools.product((1, 2), (1, 2, 3), (1, 2, 3), (0, 1))))
    modules = []
    for index, spec in enumerate(make_specs(*(f"encoder{k}" for k in range(num_encoders)))):
        some = every[rng.permutation(len(every))[: int(rng.integers(3, size + 1))]]
        tau = rng.lognormal(-4.0, 0.6, (4, len(some)))
        depth = np.where(rng.random(len(some)) < 0.5, np.inf, rng.integers(1, 4, len(some)).astype(float))
        ones = np.ones(len(some), dtype=int)
        candidates = Candidates(spec, *some[:, :3].T, ones, some[:, 3] > 0, some[:, 2] > 1, ones)
        modules.append(
            ModuleTable(
                candidates=candidates,
                tau_s=tau,
                fill_s=tau * rng.uniform(1.0, 4.0, (1, len(some))),
                sync_s=rng.uniform(0.0, 0.02, len(some)),
                max_llm_pp=depth if index < num_encoders else np.full(len(some), np.inf),
            )
        )
    return FormulaTable(int(rng.integers(1, 17)), num_processes, tuple(modules))


def every_choice(table: FormulaTable, *, max_per_llm: int | None = None) -> list[tuple[float, tuple[int, ...]]]:
    """(objective, choice) of every feasible choice, one at a time, in the order that ties are broken in."""

    def order(found: tuple[float, tuple[int, ...]]) -> tuple[object, ...]:
        picked = list(zip(table.modules, found[1], strict=True))
        content = [tuple(m.candidates.content[c].tolist()) for m, c in picked]
        return found[0], sum(int(m.num_processes[c]) for m, c in picked), content

    sizes = [range(len(m.candidates)) for m in table.modules]
    found = sorted(((table.objective(c), c) for c in itertools.product(*sizes) if table.feasible(c)), key=order)
    if max_per_llm is None:
        return found
    ranks = [sum(c[-1] == choice[-1] for _, c in found[:k]) for k, (_, choice) in enumerate(found)]
    return [f for f, rank in zip(found, ranks, strict=True) if rank < max_per_llm]


@pytest.mark.parametrize("num_encoders", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_enumeration_equals_trying_every_choice(seed, num_encoders):
    table = random_table(seed, num_encoders, size=9 if num_encoders < 3 else 5)
    expected = every_choice(table)
    assert best_choices(table, 5) == expected[:5]
    assert best_choices(table, 10**4) == expected


@pytest.mark.parametrize(("seed", "most"), [(0, 1), (1, 2), (2, 2)])
def test_enumeration_takes_the_best_few_of_each_llm_candidate(seed, most):
    table = random_table(seed, 2)
    assert best_choices(table, 6, max_per_llm=most) == every_choice(table, max_per_llm=most)[:6]


@pytest.mark.parametrize(("seed", "num_encoders"), [*((s, 1) for s in range(24)), *((s, 2) for s in range(100, 108))])
def test_program_finds_the_enumerated_optimum(seed, num_encoders):
    table = random_table(seed, num_encoders)
    choice, best = solve_milp(table), best_choices(table, 1)
    assert (choice is None) == (not best)
    if choice is not None:
        assert table.feasible(choice)
        assert table.objective(choice) == pytest.approx(best[0][0], rel=1e-9)


def formula_by_hand(problem: Problem, num_microbatches: int, layout: dict[str, Candidate]) -> float:
    """J of one layout, stage by stage and scenario by scenario."""
    steps = []
    for s in range(len(problem.batches)):
        taus, fills = {}, {}
        for name, c in layout.items():
            loads, key = problem.loads[name], {"tp": c.parallel.tp, "recompute": c.recompute}
            stages = []
            for load in (loads.per_microbatch(num_microbatches * c.parallel.dp)[:, s], loads.longest[:, s]):
                for stage, num_layers in enumerate(c.layers_per_stage):
                    edge = has_edge(c.layers_per_stage, stage)
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
    choices = [choice for _, choice in best_choices(table, 10**6)]
    assert len({m.candidates.pp.max() for m in table.modules}) > 1
    for choice in choices[:: max(1, len(choices) // 20)]:
        layout = table.layout(choice)
        draft = split_draft(problem, num_microbatches, layout, table.objective(choice))
        expected = formula_by_hand(problem, num_microbatches, layout) + draft.sync_s
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
    chosen = {str(sorted(table.layout(c).items())) for _, c in best_choices(table, 10**6)}
    roomy = make_problem("vision", num_processes=5, recompute=(False,))
    every = formula_table(roomy, 3)
    fitting = {
        str(sorted(layout.items()))
        for _, choice in best_choices(every, 10**6)
        for layout in [every.layout(choice)]
        if fits(problem, split_draft(problem, 3, layout, 0.0))
    }
    assert chosen == fitting
    assert 0 < len(chosen) < len(best_choices(every, 10**6))


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
