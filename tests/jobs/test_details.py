"""What a report is given of a run beyond its summary, out of a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflop.jobs.details import load_details
from dflop.jobs.results import load_history, load_summary, write_report
from dflop.jobs.rundir import RunDir
from dflop.report.accuracy import errors_by_size, timed_spans
from dflop.report.timeline import batch_timeline
from dflop.store import console
from tests.report.detailed import SPLIT


@pytest.fixture
def run(finished: RunDir) -> RunDir:
    return finished


def rows(run: RunDir, sql: str, **params: str) -> list[tuple]:
    return console.query(run.config().store, sql, params or None)[1]


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
    assert {c.module for c in details.corrections} == {"llm", "vision"}
    assert len(details.peaks) == SPLIT.num_processes
    assert {job.job_id for job in details.jobs} == {"1", "2"}
    assert [seen.job for seen in details.inputs] == ["plan", "train"]
    assert details.cost_sources == (("vision tp1", "analytic"), ("audio tp1", "analytic"), ("llm tp1", "analytic"))
    assert details.memory_limit_bytes == 2**30
    assert details.num_steps_planned == 6
    assert "num_steps: 6" in details.config_text


def test_the_report_is_written_with_all_of_it_that_can_be_read(run: RunDir, tmp_path: Path) -> None:
    write_report(run)
    text = run.report_file.read_text()
    assert 'id="timeline-data"' in text
    assert "costs</dt><dd>vision tp1 analytic" in text
    assert len(text.encode()) < 3_000_000
    copy = RunDir(tmp_path / run.run_id)
    shutil.copytree(run.path, copy.path)
    (copy.path / "cost_tables.json").write_text("{")
    assert load_details(copy, load_summary(copy), ()).cost_sources == ()


def test_errors_by_size_are_those_of_the_view(run: RunDir) -> None:
    found = errors_by_size(timed_spans(load_summary(run).steps))
    sql = (
        "select module, min_tokens, num_spans, median_error_frac, p95_error_frac, predicted_to_measured "
        "from v_prediction_error_by_size where run_id = $run_id order by module, min_tokens"
    )
    wanted = rows(run, sql, run_id=run.run_id)
    assert [(e.module, e.min_tokens, e.num_spans) for e in found] == [row[:3] for row in wanted]
    for error, row in zip(found, wanted, strict=True):
        told = (error.median_error_frac, error.p95_error_frac, error.predicted_to_measured)
        assert told == pytest.approx(row[3:])


def test_memory_in_sql_is_that_of_the_fuller_rank_of_a_stage(run: RunDir) -> None:
    _, found = console.query(run.config().store, console.named_query("memory").sql, {"run_id": run.run_id})
    assert [row[:2] for row in found] == [("audio", 0), ("llm", 0), ("llm", 1), ("vision", 0)]
    peaks = {(row[0], row[1]): row[4] for row in found}
    assert (peaks["vision", 0], peaks["llm", 1]) == (2**29 + 2**20, 2**29 + 2**20 * 4)
