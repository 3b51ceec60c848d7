"""What balancing is worth, by hand; that the page computes the same is held in test_browser.py."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from dflop.records import JobRecord
from dflop.report.calculator import make_calculator
from dflop.report.worth import WorthInputs, once_gpu_hours, worth

GIVEN = WorthInputs(
    num_gpus=8, num_steps=1000, step_s=3.6, speedup=1.25, speedup_low=1.2, speedup_high=1.5, usd_per_gpu_hour=2.0,
    once_gpu_hours=0.5,
)  # fmt: skip


def test_hours_and_money_by_hand() -> None:
    found = worth(GIVEN)
    hours = {"gpu_hours": 8.0, "blind_gpu_hours": 10.0, "net_gpu_hours": 1.5}
    saved = {"saved_gpu_hours": 2.0, "saved_low_gpu_hours": 1.6, "saved_high_gpu_hours": 4.0, "saved_usd": 4.0}
    others = {"net_usd": 3.0, "saved_frac": 0.2, "saved_s": 900.0, "break_even_steps": 250.0}
    assert asdict(found) == pytest.approx(hours | saved | others)


def test_what_is_slower_costs_and_never_pays_back() -> None:
    found = worth(replace(GIVEN, speedup=0.8))
    assert found.saved_gpu_hours == pytest.approx(-1.6)
    assert found.saved_frac == pytest.approx(-0.25)
    assert found.break_even_steps == math.inf
    assert worth(replace(GIVEN, speedup=0.8, once_gpu_hours=0)).break_even_steps == 0


def test_a_missing_price_leaves_the_hours() -> None:
    found = worth(replace(GIVEN, usd_per_gpu_hour=math.nan, speedup_low=math.nan))
    assert found.saved_gpu_hours == pytest.approx(2.0)
    assert math.isnan(found.saved_usd)
    assert math.isnan(found.saved_low_gpu_hours)


@pytest.mark.parametrize("name", ["num_gpus", "num_steps", "step_s", "speedup"])
@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_what_is_missing_or_impossible_makes_nothing_up(name: str, value: float) -> None:
    found = worth(replace(GIVEN, **{name: value}))
    assert math.isnan(found.saved_gpu_hours)
    assert math.isnan(found.net_usd)


def job(number: str, key: str, state: str, at_s: float, num_tasks: int = 4) -> JobRecord:
    return JobRecord("run", "name", key, "local", number, state, "", "/jobs", num_tasks, 0, at_s)


def test_spent_once_is_all_but_training_and_comparing() -> None:
    jobs = [
        job("1", "data/0", "queued", 0),
        job("1", "data/0", "done", 1000),
        job("1", "data/0", "running", 100),
        job("2", "model", "running", 0, num_tasks=2),
        job("2", "model", "failed", 1800, num_tasks=2),
        job("3", "run/train", "running", 0),
        job("3", "run/train", "done", 9999),
        job("4", "run/compare", "running", 0),
        job("4", "run/compare", "done", 9999),
        job("5", "data/1", "queued", 0),
    ]
    assert once_gpu_hours(jobs) == pytest.approx((4 * 900 + 2 * 1800) / 3600)
    assert once_gpu_hours([]) == 0


def test_a_calculator_computes_with_what_its_fields_show() -> None:
    found = make_calculator(replace(GIVEN, step_s=1 / 3, speedup_low=math.nan), {"step_s": "measured"})
    fields = {field.name: field for field in found.fields}
    assert (fields["step_s"].value, fields["step_s"].origin) == ("0.333333", "measured")
    assert fields["num_steps"].value == "1000"
    assert fields["speedup_low"].value == ""
    outputs = {output.name: output for output in found.outputs}
    assert outputs["gpu_hours"].value == 8 * 0.333333 * 1000 / 3600
    assert outputs["saved_low_gpu_hours"].text == "-"
    assert outputs["saved_frac"].text == "20.0 %"
    assert outputs["saved_usd"].unit == "USD"
