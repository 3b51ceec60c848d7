"""What tables of single parts say of made-up figures."""

from __future__ import annotations

from tests.bench import markdown
from tests.bench.correct import page as correct
from tests.bench.data import page as data
from tests.bench.schedule import makespan_page
from tests.bench.suite import __main__ as suite_bench
from tests.bench.suite import page as suite


def case(model: str, data: str, ours_s: float, *, tuned_over: int = 0, reference: bool = True) -> dict:
    steps = {"uniform tuned": 2.0, "uniform default": 4.0, "token LPT": 1.6, "dflop": ours_s}
    steps |= {"reference": 2.0} if reference else {}
    return {
        "model": model, "data": data, "num_gpus": 64, "reference_fits": reference,
        "step_s": {name: [s, 2 * s] for name, s in steps.items()},
        "num_over_cap": dict.fromkeys(steps, 0) | {"uniform tuned": tuned_over},
        "bound_s": [0.5, 1.0], "bound_of_our_tp_s": [0.8, 1.6],
    }  # fmt: skip


CASES = [case("A", "main", 1.0), case("A", "heavy", 0.8, tuned_over=2, reference=False)]


def test_the_suite_says_which_plans_exceed_memory():
    found = suite.tables({"cases": CASES})
    row = next(line for line in found["suite"].splitlines() if line.startswith("| A "))
    assert row == "| A | 0.50x | 1.25x | 1.00x | **2.00x** | 0.50x | 1.25x | none fits | **2.50x** |"
    assert "exceeds it in 1 of the 2 cases, ours in 0" in found["suite"].replace("\n", " ")
    assert "2.00 to 2.50x of the best uniform plan, which exceeds memory in 1 of the 2 cases." in found["suite-short"]
    assert "1.6 to 2.0 times as fast as ours" in found["suite"]


def test_a_plan_that_exceeds_memory_or_is_slower_misses_a_bound():
    worse = case("B", "main", 3.0)
    worse["num_over_cap"]["dflop"] = 1
    assert [is_met for _, is_met in suite_bench.bounds([CASES[0], worse])] == [True, True, False, False]


def test_a_recovered_share_is_of_what_is_lost_without_correction():
    regret = {"none": 0.2, "module average": 0.15, "bucket average": 0.1, "ours": 0.01}
    runs = [
        {"case": name, "contender": who, "noise_frac": noise, "early_regret": 0 if name == "right" else of,
         "last_regret": 0.001}
        for name in correct.CASES for who, of in regret.items() for noise in (0.05, 0.15)
    ]  # fmt: skip
    found = correct.tables({"synthetic": {"runs": runs, "seeds": [0], "num_steps": 120}})
    assert (
        "| one rank of four 1.5x | 20.0 / 0.10 | 15.0 / 0.10 | 10.0 / 0.10 | 1.0 / 0.10 | 1.0 / 0.10 |"
        in found["correct"]
    )
    assert "95 % is recovered in steps 5 to 20; where predictions are right, 0 / 0.10 %" in found["correct-short"]


def test_the_largest_batches_are_told():
    def cell(n: int, reduction: float) -> dict:
        return {"num_samples": n, "reduction": {"full": [reduction]}, "cpu_ms": {"full": [50.0]}, "gap_frac": [0.0]}

    found = makespan_page.tables({"cells": [cell(8, 0.9), cell(1024, 0.1), cell(1024, 0.2)], "real_sizes": False})
    assert "1,024 samples a global batch, generated samples: a step is 10 to 20 % shorter" in found["packing-simulated"]


def test_a_way_with_nothing_beside_it_has_empty_cells():
    figure = {"name": "  texts", "seconds": 2.0, "other": "", "other_s": None, "note": "5 per s"}
    beside = {**figure, "other": "one by one", "other_s": 5.0}
    rows = data.tables({"figures": [figure, beside]})["data"].splitlines()[2:]
    assert rows == ["| Texts | 2.0 s | 5 per s |  |  |", "| Texts | 2.0 s | 5 per s | one by one, 5.0 s | 2.5x |"]


def test_cells_cannot_break_a_table():
    assert markdown.table(("a",), [("x | y",)]).splitlines()[2] == "| x \\| y |"
    assert (markdown.span([1.001, 1.002]), markdown.span([1.0, 2.0])) == ("1.00", "1.00 to 2.00")
