"""What a report is given of a run beyond its summary, out of a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflop import units
from dflop.report.tables import key_numbers
from dflop.report.terminal import markdown_summary
from dflop.report.timeline import batch_timeline
from dflop.run.directory import RunDir
from dflop.store.console import query
from dflop.views.load_details import load_details
from dflop.views.run_results import load_history, load_summary, write_report


@pytest.fixture
def run(finished: RunDir) -> RunDir:
    return finished


def test_the_batch_that_is_shown_comes_with_its_plans_and_shapes_and_everything_else_is_there(run: RunDir) -> None:
    summary = load_summary(run)
    details = load_details(run, summary, load_history(run.config().store, run.run_id))
    assert summary.comparison is not None
    pair = summary.comparison.typical_pair()
    assert pair is not None
    assert sorted(details.shapes) == sorted(pair.sample_index)
    assert {p.step for p in details.compare_plans} == {s.step for s in pair.typical()}
    found = batch_timeline(pair, summary.plan, details.compare_plans, details.shapes, summary.num_cores)
    assert None not in found.samples
    assert all(lane.predicted for track in found.tracks for lane in track.lanes)
    assert dict(details.facts)["model"] == "qwen2_5_omni_thinker, float32"
    assert details.cost_sources == (("vision tp1", "analytic"), ("audio tp1", "analytic"), ("llm tp1", "analytic"))
    assert details.memory_limit_bytes == 2**30
    assert details.num_steps_planned == 6
    assert "num_steps: 6" in details.config_text


def test_the_report_is_written_with_all_of_it_that_can_be_read(run: RunDir, tmp_path: Path) -> None:
    write_report(run)
    text = run.report_file.read_text()
    assert 'id="timeline-data"' in text
    assert "costs</dt><dd>vision tp1 analytic" in text
    copy = RunDir(tmp_path / run.run_id)
    shutil.copytree(run.path, copy.path)
    (copy.path / "cost_tables.json").write_text("{")
    assert load_details(copy, load_summary(copy), ()).cost_sources == ()


def test_the_card_the_verdict_the_page_and_sql_tell_one_speedup_with_one_interval(run: RunDir) -> None:
    summary, store = write_report(run), run.config().store
    card = {label: f"{value} ({remark})" for label, value, remark in key_numbers(summary)}
    page = run.report_file.read_text()
    columns, found = query(store, "from v_run_summary")
    row = dict(zip(columns, found[0], strict=True))
    assert query(store, "select * exclude (run_id, num_batches) from v_speedup")[1] == [
        tuple(row[f"{what}_speedup{end}"] for what in ("measured", "predicted") for end in ("", "_low", "_high"))
    ]
    for what, label in (("measured", "speedup, measured"), ("predicted", "speedup, simulated")):
        told = units.speedup(*(row[f"{what}_speedup{end}"] for end in ("", "_low", "_high")))
        assert "interval" in told
        assert told == card[label]
        assert told in summary.verdict
        assert told in markdown_summary(summary)
        assert told in page
    assert (row["planned_speedup"], row["planned_speedup_over_uniform"]) == (
        summary.plan.planned_speedup, summary.plan.planned_speedup_over_uniform,
    )  # fmt: skip
    steps = {p.policy: (p.step_s, p.idle_frac) for p in summary.comparison.policies}
    for policy in ("arrival", "balanced"):
        assert (row[f"{policy}_step_s"], row[f"{policy}_idle_frac"]) == pytest.approx(steps[policy])
