"""The program against trying every cover, on random columns."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from dflop.plan import program
from dflop.plan.columns import Columns, Found
from dflop.plan.program import CUTOFF_RATIO, optimum, process_price_s
from dflop.plan.verdict import proven
from dflop.records import LLM


def random_columns(seed: int, num_encoders: int, *, step_s: float = 0.0, size: int = 4) -> Columns:
    """Of every subset that may share ranks some grids at random costs, in multiples of `step_s`."""
    rng, names = np.random.default_rng(seed), [f"encoder{k}" for k in range(num_encoders)]
    alone = [(name,) for name in names]
    with_llm = [(*of, LLM) for n in range(num_encoders + 1) for of in itertools.combinations(names, n)]
    every, modules = np.array(list(itertools.product((1, 2), (1, 2, 3), (1, 2, 3)))), (*names, LLM)
    holds, degrees = [], []
    for subset in (*alone, *with_llm):
        some = every[rng.permutation(len(every))[: int(rng.integers(1, size + 1))]]
        ones = np.ones(len(some), dtype=int)
        degrees.append(np.stack([*some.T, ones, ones, rng.integers(0, 3, len(some))]))
        holds.append(np.outer([name in subset for name in modules], ones) > 0)
    held = np.concatenate(holds, axis=1)
    num = held.shape[1]
    tau_s = rng.lognormal(-4.0, 0.6, (4, num)) * held.sum(axis=0)
    fill_s, sync_s = tau_s * rng.uniform(1.0, 4.0, (1, num)), rng.uniform(0.0, 0.02, num)
    if step_s:
        tau_s, fill_s, sync_s = (np.ceil(part / step_s) * step_s for part in (tau_s, fill_s, sync_s))
    depth = np.where(held[-1] | (rng.random(num) < 0.5), np.inf, rng.integers(1, 4, num).astype(float))
    place = np.zeros((2, num), dtype=int)
    return Columns(
        modules, int(rng.integers(1, 17)), 12, held, np.concatenate(degrees, axis=1), tau_s, fill_s, sync_s, depth, (),
        place,
    )  # fmt: skip


def value_by_hand(columns: Columns, cover: tuple[int, ...]) -> float:
    """J of columns that hold every module once, infinite where it is no plan."""
    (llm,) = (c for c in cover if columns.holds[-1, c])
    encoders = [c for c in cover if c != llm]
    if columns.degrees[:4, list(cover)].prod(axis=0).sum() > columns.num_processes:
        return math.inf
    if any(columns.degrees[1, llm] > columns.max_llm_pp[c] for c in encoders):
        return math.inf
    steps_s = []
    for s in range(len(columns.tau_s)):
        fill_s = max((float(columns.fill_s[s, c]) for c in encoders), default=0.0) + float(columns.fill_s[s, llm])
        steps_s.append(fill_s + (columns.num_microbatches - 1) * max(float(columns.tau_s[s, c]) for c in cover))
    return sum(steps_s) / len(steps_s) + max(float(columns.sync_s[c]) for c in cover)


def enumerated(columns: Columns) -> list[Found]:
    """(J, cover) of every plan, in the order that ties are broken in."""
    every = range(len(columns))
    covers = [
        cover
        for n in range(1, len(columns.modules) + 1)
        for cover in itertools.combinations(every, n)
        if (columns.holds[:, list(cover)].sum(axis=1) == 1).all()
    ]
    found = ((value_by_hand(columns, cover), cover) for cover in covers)
    return sorted((each for each in found if math.isfinite(each[0])), key=columns.order)


def solved(columns: Columns, known_s: float = math.inf, top: int = 5, **how: float) -> program.Optimum:
    return optimum(columns, columns.num_microbatches, known_s, top, **how)  # type: ignore[arg-type]  # a test's keywords


@pytest.mark.parametrize("num_encoders", range(3))
def test_the_cover_of_the_program_is_the_first_of_the_enumeration(num_encoders):
    ties, sizes = 0, set[int]()
    for seed in range(25):
        # Every second one has equals by design.
        columns = random_columns(seed, num_encoders, step_s=0.03 * (seed % 2))
        expected, found = enumerated(columns), solved(columns, ratio=(1.0, CUTOFF_RATIO)[seed % 2])
        proof = found.program
        if not expected:
            assert (proof.status, found.found) == ("infeasible", [])
            continue
        ties += len(expected) > 1 and expected[1][0] == expected[0][0]
        value_s, cover = found.found[0]
        assert (value_s, sorted(cover)) == (expected[0][0], sorted(expected[0][1]))
        assert (proof.status, proof.objective_s) == ("optimal", expected[0][0])
        assert proof.gap_frac < 1e-8
        assert {(v, tuple(sorted(c))) for v, c in found.found} <= set(expected)
        sizes.add(len(cover))
    assert ties or not num_encoders
    assert sizes == set(range(1, num_encoders + 2)), "one grid, one each, and what is between"


def test_no_plan_is_below_the_bound_of_its_columns():
    for seed in range(20):
        columns = random_columns(seed, seed % 3)
        expected = enumerated(columns)
        for c, bound_s in enumerate(columns.bounds_s.tolist()):
            assert min((v for v, cover in expected if c in cover), default=math.inf) >= bound_s * (1 - 1e-12)


def test_the_order_of_columns_changes_nothing():
    columns, rng = random_columns(3, 2, step_s=0.01), np.random.default_rng(0)
    rows = rng.permutation(len(columns))
    first, second = (solved(of, top=1).found[0] for of in (columns, columns.select(rows)))
    assert second[0] == first[0]
    assert sorted(rows[list(second[1])].tolist()) == sorted(first[1])


def test_a_stop_at_the_node_limit_leaves_the_best_known_and_says_how_much_better_one_could_be():
    stopped = []
    for seed in range(40):
        columns = random_columns(seed, 2, size=6)
        found, expected = solved(columns, top=1, max_nodes=0), enumerated(columns)
        proof = found.program
        assert proof.bound_s <= expected[0][0] * (1 + 1e-9)
        assert expected[0][0] <= proof.objective_s <= proof.incumbent_s
        assert proof.gap_frac == pytest.approx(1 - proof.bound_s / proof.objective_s)
        stopped += [proof] * (proof.status == "node limit")
    for proof in stopped:
        is_open = proof.bound_s < proof.objective_s * (1 - 1e-9)
        assert any("the best known one takes" in line for line in proven([proof])) == is_open


def test_what_cannot_come_near_the_best_plan_known_is_not_solved():
    for seed in range(8):
        columns = random_columns(seed, 1)
        best_s = enumerated(columns)[0][0]
        for known_s in (best_s, best_s / 3):
            found, limit_s = solved(columns, known_s), CUTOFF_RATIO * known_s
            proof = found.program
            assert proof.status == ("optimal" if best_s <= limit_s else "bounded")
            assert proof.bound_s <= best_s * (1 + 1e-9)
            assert proof.bound_s >= min(limit_s, best_s) * (1 - 1e-9)
            assert all(value_s <= limit_s for value_s, _ in found.found)
    nothing = optimum(None, 4, 2.0, 1, ratio=1.0).program
    assert (nothing.status, nothing.bound_s, nothing.objective_s) == ("bounded", 2.0, math.inf)
    assert proven([]) == []


def test_the_price_of_a_process_is_what_mixing_two_layouts_would_save():
    columns, two = random_columns(0, 0), np.array([0, 0])
    degrees = np.array([[1, 1], [1, 1], [1, 3], [1, 1], [1, 1], [0, 0]])
    seconds, none = np.array([[10.0, 4.0]]), np.zeros(2)
    columns = dataclasses.replace(
        columns, num_microbatches=1, num_processes=2, holds=np.ones((1, 2), dtype=bool), degrees=degrees,
        tau_s=seconds, fill_s=seconds, sync_s=none, max_llm_pp=none + np.inf, place=np.array([two, two]),
    )  # fmt: skip
    best = solved(columns, top=1)
    assert best.found == [(10.0, (0,))]
    assert process_price_s(best) == pytest.approx(3.0)
