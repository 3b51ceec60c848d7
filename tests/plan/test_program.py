"""The program against trying every choice, on random tables."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from dflop.plan import program
from dflop.plan.candidates import Candidates
from dflop.plan.columns import Columns, Found
from dflop.plan.formula import FormulaTable, ModuleTable
from dflop.plan.program import CUTOFF_RATIO, good_choice, optima, process_price_s
from dflop.plan.verdict import proven
from tests.builders import make_specs


def random_table(seed: int, num_encoders: int, *, step_s: float = 0.0, size: int = 9) -> FormulaTable:
    """Candidates of every degree up to 3, a random part of them, at random costs, in multiples of `step_s`."""
    rng = np.random.default_rng(seed)
    every = np.array(list(itertools.product((1, 2), (1, 2, 3), (1, 2, 3), (0, 1))))
    modules = []
    for index, spec in enumerate(make_specs(*(f"encoder{k}" for k in range(num_encoders)))):
        some = every[rng.permutation(len(every))[: int(rng.integers(3, size + 1))]]
        tau_s = rng.lognormal(-4.0, 0.6, (4, len(some)))
        fill_s = tau_s * rng.uniform(1.0, 4.0, (1, len(some)))
        sync_s = rng.uniform(0.0, 0.02, len(some))
        if step_s:
            tau_s, fill_s, sync_s = (np.ceil(part / step_s) * step_s for part in (tau_s, fill_s, sync_s))
        depth = np.where(rng.random(len(some)) < 0.5, np.inf, rng.integers(1, 4, len(some)).astype(float))
        ones = np.ones(len(some), dtype=int)
        candidates = Candidates(spec, *some[:, :3].T, ones, some[:, 3] > 0, some[:, 2] > 1, ones)
        deepest = depth if index < num_encoders else np.full(len(some), np.inf)
        modules.append(ModuleTable(candidates, tau_s, fill_s, sync_s, deepest))
    return FormulaTable(int(rng.integers(1, 17)), 12, tuple(modules))


def enumerated(table: FormulaTable) -> list[Found]:
    """(J, choice) of every feasible choice, one at a time, in the order that ties are broken in."""

    def order(found: Found) -> tuple[object, ...]:
        picked = list(zip(table.modules, found[1], strict=True))
        content = [tuple(m.candidates.content[c].tolist()) for m, c in picked]
        return found[0], sum(int(m.num_processes[c]) for m, c in picked), content

    sizes = [range(len(m.candidates)) for m in table.modules]
    return sorted(((table.objective(c), c) for c in itertools.product(*sizes) if table.feasible(c)), key=order)


@pytest.mark.parametrize("num_encoders", range(4))
def test_the_choice_of_the_program_is_the_first_of_the_enumeration(num_encoders, monkeypatch):
    ties = 0
    for seed in range(25):
        # Every second table has equals by design; every third breaks ties by programs, as large ones do.
        table = random_table(seed, num_encoders, step_s=0.01 * (seed % 2), size=9 if num_encoders < 3 else 5)
        monkeypatch.setattr(program, "MAX_COMBINED", 0 if seed % 3 == 0 else 10**6)
        expected, (found,) = enumerated(table), optima([table], math.inf, 5, ratio=(1.0, CUTOFF_RATIO)[seed % 2])
        proof = found.program
        if not expected:
            assert (proof.status, found.found, good_choice(table)) == ("infeasible", [], None)
            continue
        ties += len(expected) > 1 and expected[1][0] == expected[0][0]
        assert found.found[0] == expected[0]
        assert (proof.status, proof.objective_s) == ("optimal", expected[0][0])
        assert proof.gap_frac < 1e-8
        assert set(found.found) <= set(expected)
        good = good_choice(table)
        assert good is not None
        assert table.feasible(good[1])
    assert ties or not num_encoders


def test_chains_of_all_modules_and_grids_of_single_ones_are_columns_of_one_program():
    winners = set()
    for seed in range(40):
        table, rng = random_table(seed, seed % 3, size=6), np.random.default_rng(seed)
        expected = enumerated(table)
        best_s = expected[0][0] if expected else 0.1
        values_s = np.sort(best_s * rng.uniform(0.9, 1.4, int(rng.integers(1, 5))))
        chains = [SimpleNamespace(formula_step_s=value_s, num_processes=12) for value_s in values_s.tolist()]
        (found,) = optima([table], math.inf, 5, chains={table.num_microbatches: chains})
        proof, optimum_s = found.program, min([values_s[0], *(value_s for value_s, _ in expected[:1])])
        assert (proof.status, proof.objective_s) == ("optimal", optimum_s)
        assert proof.bound_s == pytest.approx(optimum_s, rel=1e-8)
        # Another number of microbatches that is known to be better leaves nothing to solve.
        (other,) = optima([table], optimum_s / 2, 5, chains={}, ratio=1.0)
        assert other.program.bound_s >= min(optimum_s / 2, best_s) * (1 - 1e-12)
        winners.add(optimum_s == values_s[0])
    assert winners == {True, False}


def test_no_choice_is_below_the_bound_of_its_candidates():
    for seed in range(20):
        table = random_table(seed, seed % 4, size=6)
        columns, expected = Columns.of(table), enumerated(table)
        for module, bound_s in enumerate(columns.bound_s):
            for c, bound in enumerate(bound_s.tolist()):
                assert min((v for v, choice in expected if choice[module] == c), default=math.inf) >= bound * (
                    1 - 1e-12
                )
        assert columns.least_s * (1 - 1e-12) <= (expected[0][0] if expected else math.inf)


def test_the_order_of_candidates_changes_nothing():
    table, rng = random_table(3, 2, step_s=0.01), np.random.default_rng(0)
    rows = [rng.permutation(len(m.candidates)) for m in table.modules]
    (first,), (second,) = (optima([t], math.inf, 1) for t in (table, table.select(rows)))
    assert second.found[0][0] == first.found[0][0]
    assert tuple(int(of[c]) for of, c in zip(rows, second.found[0][1], strict=True)) == first.found[0][1]


def test_a_stop_at_the_node_limit_leaves_the_best_known_and_says_how_much_better_one_could_be():
    stopped = []
    for seed in range(12):
        table = random_table(seed, 3, size=12)
        (found,), expected = optima([table], math.inf, 5, max_nodes=0), enumerated(table)
        proof = found.program
        assert proof.bound_s <= expected[0][0] * (1 + 1e-9)
        assert expected[0][0] <= proof.objective_s <= proof.incumbent_s
        assert proof.gap_frac == pytest.approx(1 - proof.bound_s / proof.objective_s)
        stopped += [proof] * (proof.status == "node limit")
    assert stopped
    assert any(proof.gap_frac > 0.001 for proof in stopped)
    assert all("the best known one takes" in line for line in proven([max(stopped, key=lambda p: p.gap_frac)]))


def test_what_cannot_come_near_the_best_plan_known_is_not_solved():
    tables = [random_table(seed, 1) for seed in range(8)]
    best_s = min(enumerated(table)[0][0] for table in tables)
    for known_s in (math.inf, best_s / 3):
        programs = [found.program for found in optima(tables, known_s, 3)]
        limit_s = CUTOFF_RATIO * min(known_s, best_s)
        for table, proof in zip(tables, programs, strict=True):
            if (optimum_s := enumerated(table)[0][0]) > limit_s:
                assert proof.status == "bounded"
                assert min(limit_s, proof.objective_s) <= proof.bound_s * (1 + 1e-12)
            else:
                assert (proof.status, proof.objective_s) == ("optimal", optimum_s)
        assert {p.status for p in programs} == ({"bounded"} if known_s < best_s else {"bounded", "optimal"})
    assert proven([]) == []


def test_the_price_of_a_process_is_what_mixing_two_layouts_would_save():
    spec, one = make_specs()[0], np.ones(2, dtype=int)
    llm = Candidates(spec, one, one, np.array([1, 3]), one, one > 1, one > 1, one)
    seconds = np.array([[10.0, 4.0]])
    table = FormulaTable(1, 2, (ModuleTable(llm, seconds, seconds, np.zeros(2), np.full(2, np.inf)),))
    (best,) = optima([table], math.inf, 1)
    assert best.found == [(10.0, (0,))]
    assert process_price_s(best) == pytest.approx(3.0)
