from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflop.plan.enumerate import best_choices, num_choices
from dflop.plan.formula import FormulaTable, ModuleTable
from dflop.plan.milp import solve_milp


def random_table(seed: int, num_encoders: int, *, num_processes: int = 12) -> FormulaTable:
    rng = np.random.default_rng(seed)
    modules = []
    for index in range(num_encoders + 1):
        size, scenarios = int(rng.integers(3, 10)), 4
        tau = rng.lognormal(-4.0, 0.6, (scenarios, size))
        depth = np.where(rng.random(size) < 0.5, np.inf, rng.integers(1, 5, size).astype(float))
        modules.append(
            ModuleTable(
                module="llm" if index == num_encoders else f"encoder{index}",
                tau_s=tau,
                fill_s=tau * rng.uniform(1.0, 4.0, (1, size)),
                num_processes=rng.integers(1, 8, size),
                pp=rng.integers(1, 5, size),
                max_llm_pp=depth if index < num_encoders else np.full(size, np.inf),
            )
        )
    return FormulaTable(int(rng.integers(1, 17)), num_processes, tuple(modules))


def every_choice(table: FormulaTable):
    """(objective, choice) of every feasible choice, one at a time."""
    sizes = [range(len(m.num_processes)) for m in table.modules]
    return sorted((table.objective(c), c) for c in itertools.product(*sizes) if table.feasible(c))


@pytest.mark.parametrize("num_encoders", [0, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_enumeration_equals_trying_every_choice(seed, num_encoders):
    table = random_table(seed, num_encoders)
    found, expected = best_choices(table, 5), every_choice(table)[:5]
    assert [c for _, c in found] == [c for _, c in expected]
    assert [j for j, _ in found] == pytest.approx([j for j, _ in expected], rel=1e-12)
    assert num_choices(table) >= len(expected)


@pytest.mark.parametrize("num_encoders", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_program_finds_the_enumerated_optimum(seed, num_encoders):
    table = random_table(seed, num_encoders)
    choice, best = solve_milp(table), best_choices(table, 1)
    if not best:
        assert choice is None
    else:
        assert choice is not None
        assert table.feasible(choice)
        assert table.objective(choice) == pytest.approx(best[0][0], rel=1e-9)


def test_program_and_enumeration_agree_that_nothing_fits():
    table = random_table(0, 2, num_processes=2)
    assert solve_milp(table) is None
    assert best_choices(table, 3) == []
