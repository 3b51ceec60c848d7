from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dflop.records import LLM, RankMemory
from dflop.report.report_sections import (
    median_mfu,
    memory_rows,
    memory_table,
    run_calculator,
    run_facts,
    slow_rank_table,
)
from dflop.report.run_details import RunDetails
from dflop.report.summary import summarise
from tests.builders import make_cluster, make_plan, make_rank_factor
from tests.report.runs import CUDA, make_run, observe


def peak(rank: int, module: str, peak_bytes: int, *, attempt: int = 1, stage: int = 0, kind: str = "allocated"):
    return RankMemory("run", attempt, 20, rank, module, stage, 0, 0, kind, peak_bytes, 0.0)


def test_facts_of_a_run(run) -> None:
    facts = dict(run_facts(*run))
    assert facts["run"] == "demo, done"
    assert facts["optimizer steps"] == "24 of 24, of 16 samples each"
    assert facts["processes"] == "5: vision dp2 | audio dp1 | llm pp2 dp1"
    assert facts["model"] == "tiny"
    assert facts["model FLOPs utilisation"].endswith("measured, median over steps")
    summary, details = run
    assert "model FLOPs utilisation" not in dict(run_facts(summary, RunDetails()))
    found = sorted(1e12 / (4e13 * s.step_s) for s in summary.steps)
    assert median_mfu(summary, details) == pytest.approx((found[11] + found[12]) / 2)
    unknown = replace(details, flops=tuple(replace(f, peak_flops_per_s=math.nan) for f in details.flops))
    assert math.isnan(median_mfu(summary, unknown))


def test_memory_of_a_stage_is_that_of_its_fullest_rank_in_the_last_start() -> None:
    plan = make_plan({"vision": 2, LLM: 1}, llm_pp=2)
    sized = replace(plan, modules=tuple(replace(m, stage_memory_bytes=(100,) * m.parallel.pp) for m in plan.modules))
    peaks = [peak(0, "vision", 50, attempt=1), peak(0, "vision", 70, attempt=2), peak(1, "vision", 80, attempt=2),
             peak(3, LLM, 60, stage=1, attempt=2)]  # fmt: skip
    assert memory_rows(sized, peaks) == (
        ("vision pp0", 100, 80), ("llm pp0", 100, None), ("llm pp1", 100, 60),
    )  # fmt: skip
    assert memory_rows(plan, peaks) == (), "a plan that says nothing about memory"
    table = memory_table(memory_rows(sized, peaks), 200, {"allocated"})
    assert table.rows[0] == ("vision pp0", "100 B", "50.0 %", "80 B", "40.0 %")
    assert table.rows[1][3:] == ("-", "-")
    assert table.note == "Limit: 200 B of a process. Measured: what torch held on the device."
    assert "the whole process" in memory_table((("llm pp0", 100, 500),), 200, {"process"}).note
    assert "nobody measured" in memory_table((("llm pp0", 100, None),), None).note


def test_slow_ranks_are_the_newest_factors_that_say_something() -> None:
    rows = slow_rank_table([
        make_rank_factor(2, 1.5, observed_at_s=1.0),
        make_rank_factor(2, 1.3, observed_at_s=2.0),
        make_rank_factor(0, 1.01, is_in_force=False),
        make_rank_factor(1, 1.2, is_in_force=False),
    ]).rows  # fmt: skip
    assert [(row[0], row[3], row[5]) for row in rows] == [("2", "1.30x", "yes"), ("1", "1.20x", "no")]
    assert slow_rank_table([make_rank_factor(0, 1.0, is_in_force=False)]).rows == ()


def test_the_calculator_begins_with_what_the_run_measured(run) -> None:
    summary, details = run
    found = {field.name: field for field in run_calculator(summary, details).fields}
    assert summary.comparison is not None
    assert float(found["speedup"].value) == pytest.approx(summary.comparison.measured.mean, rel=1e-5)
    assert float(found["speedup_low"].value) == pytest.approx(summary.comparison.measured.low, rel=1e-5)
    assert found["speedup"].origin == "measured on 4 global batches of this run"
    assert float(found["step_s"].value) == pytest.approx(summary.step_s, rel=1e-5)
    assert float(found["once_gpu_hours"].value) == pytest.approx(2 * 36 / 3600)
    assert found["num_gpus"].label == "processes"


def test_without_a_comparison_it_begins_with_what_was_simulated() -> None:
    plan = replace(make_plan({LLM: 2}), predicted_step_s=2.0, baseline_step_s=3.0)
    summary = summarise(run=make_run(), cluster=CUDA, plan=plan, train=[observe(0)])
    found = {field.name: field for field in run_calculator(summary, RunDetails()).fields}
    assert found["speedup"].value == "1.5"
    assert found["speedup"].origin.startswith("simulated")
    assert found["speedup_low"].value == ""
    assert found["num_gpus"].label == "GPUs"
    nothing = summarise(run=make_run(), cluster=make_cluster(), plan=make_plan({LLM: 1}), train=[])
    assert {f.name for f in run_calculator(nothing, RunDetails()).fields if not f.value} == {
        "step_s", "speedup", "speedup_low", "speedup_high",
    }  # fmt: skip
