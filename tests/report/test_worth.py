"""What balancing is worth, by hand."""

from dataclasses import replace

import pytest

from dflop.records import LLM, JobRecord
from dflop.report.summary import RunSummary
from dflop.report.worth import once_hours, worth_table
from tests.builders import make_cluster, make_plan
from tests.report.runs import CUDA, comparison_of, make_run, observe, speedups_of


def job(number: str, key: str, state: str, at_s: float, num_tasks: int = 4) -> JobRecord:
    return JobRecord("run", "name", key, "local", number, state, "", "/jobs", num_tasks, 0, at_s)


def test_hours_are_those_of_the_whole_training_at_the_measured_speedup() -> None:
    seen, plans = comparison_of([([1.25], [1.0])] * 3)
    jobs = (job("1", "data", "running", 0), job("1", "data", "done", 450))
    found = RunSummary(
        run=make_run(), cluster=CUDA, plan=make_plan({LLM: 8}), train=[observe(0, step_s=3.6)], compare=seen,
        speedups=speedups_of(seen, plans),
        compare_plans=tuple(plans), num_steps_planned=1000, epoch_steps=62.5, jobs=jobs,
    )  # fmt: skip
    table = worth_table(found)
    assert table.header[1] == "hours of GPUs"
    assert dict(table.rows) == {
        "training, balanced": "8.0", "training, arrival order": "10.0", "an epoch, balanced": "0.5000",
        "saved": "2.0 (95 % interval 2.0 to 2.0)",
        "one-time cost of profiling and planning": "0.5000", "break-even after": "250 steps",
    }  # fmt: skip
    assert "speedup measured" in table.note
    priced = worth_table(replace(found, usd_per_gpu_hour=2.5))
    assert priced.header[2] == "USD"
    assert [row[2] for row in priced.rows] == ["20.00", "25.00", "1.25", "5.00", "1.25", ""]


def test_without_a_comparison_the_planned_speedup_counts_and_what_is_slower_never_pays_back() -> None:
    plan = replace(make_plan({LLM: 2}), predicted_step_s=2.0, baseline_step_s=1.6)
    jobs = (job("1", "data", "running", 0), job("1", "data", "done", 450))
    table = worth_table(RunSummary(run=make_run(), cluster=make_cluster(), plan=plan, train=[observe(0)], jobs=jobs))
    assert table.header[1] == "hours of processes"
    assert dict(table.rows)["saved"].startswith("-0.0001")
    assert dict(table.rows)["break-even after"] == "never"
    assert "simulated when planning" in table.note
    assert worth_table(RunSummary(run=make_run(), cluster=CUDA, plan=plan, train=[])).rows == ()


def test_spent_once_is_all_but_training_and_comparing() -> None:
    trained = [job(*of, state, at_s) for of in (("3", "run/train"), ("4", "run/compare"))
               for state, at_s in (("running", 0), ("done", 9999))]  # fmt: skip
    jobs = [*(job("1", "data/0", state, at_s) for state, at_s in (("queued", 0), ("done", 1000), ("running", 100))),
            *(job("2", "model", state, at_s, num_tasks=2) for state, at_s in (("running", 0), ("failed", 1800))),
            *trained, job("5", "data/1", "queued", 0)]  # fmt: skip
    assert once_hours(jobs) == pytest.approx((4 * 900 + 2 * 1800) / 3600)
    assert once_hours([]) == 0
