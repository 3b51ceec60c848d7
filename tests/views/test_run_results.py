"""What a report is given of a run, out of a store."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dflop import units
from dflop.config import dump_config
from dflop.models import GENERIC, cache_of_models
from dflop.models.generic.exactness import Exactness, KeptCheck, MediumCheck, check_file
from dflop.models.generic.facts import keep
from dflop.models.processor_settings import read_object
from dflop.report.run_tables import key_numbers
from dflop.report.summary import RunSummary
from dflop.report.terminal import markdown_summary
from dflop.report.timeline import batch_steps
from dflop.run.directory import RunDir
from dflop.store.console import query
from dflop.views.run_results import load_summary, write_report
from tests.models.generic.configs import config_of


def test_everything_that_a_page_shows_is_there(finished: RunDir) -> None:
    summary = load_summary(finished)
    assert summary.comparison is not None
    pair = summary.comparison.typical_pair()
    assert pair is not None
    steps = batch_steps(pair, summary.plan, summary.compare_plans, summary.num_cores)
    assert all(lane.thin for step in steps for lane in step.lanes)
    assert dict(summary.facts)["model"] == "qwen2_5_omni_thinker, float32"
    assert summary.cost_sources == (("vision tp1", "analytic"), ("audio tp1", "analytic"), ("llm tp1", "analytic"))
    assert [(term.name, term.used) for term in summary.terms] == [
        ("llm tp1: forward of a layer", "measured"), ("llm tp1: kept by a layer", "measured"),
    ]  # fmt: skip
    assert summary.cluster.memory_per_process_bytes == 2**30
    assert summary.num_steps_planned == 6
    assert "num_steps: 6" in summary.config_text
    assert summary.history
    check, note = summary.model_check
    assert check is None
    assert "a tiny qwen2_5_omni_thinker" in note


def test_the_check_of_a_models_folder_is_found_by_runs_of_that_config_and_no_other(
    finished: RunDir, tmp_path: Path
) -> None:
    folder, run, config = tmp_path / "a model", RunDir(tmp_path / finished.run_id), finished.config()
    config_of("qwen3_5").save_pretrained(folder)
    stated = read_object(folder / "config.json", "")
    shutil.copytree(finished.path, run.path)

    def summary(hf_config: dict[str, Any]) -> RunSummary:
        model = config.model.model_copy(update={"family": GENERIC, "hf_config": hf_config, "processor": folder})
        run.config_file.write_text(dump_config(config.model_copy(update={"model": model})))
        return load_summary(run)

    check, note = summary(stated).model_check
    assert check is None
    assert f"dflop model check '{folder}' --store {config.store}" in note
    check = KeptCheck("torch 2", "abc", 0.0, Exactness((MediumCheck("text", (("model.norm", 2e-7),)),), 9), ())
    keep(check_file(cache_of_models(config.store), stated, folder), check)
    assert summary(stated).model_check == (check, note)
    assert summary(stated | {"image_token_id": 7}).model_check == (None, note)


def test_the_report_is_written_with_all_of_it_that_can_be_read(finished: RunDir, tmp_path: Path) -> None:
    write_report(finished)
    text = finished.report_file.read_text()
    assert "<title>0: vision pp0 dp0: forward of microbatch 0" in text
    assert "costs</dt><dd>vision tp1 analytic" in text
    copy = RunDir(tmp_path / finished.run_id)
    shutil.copytree(finished.path, copy.path)
    (copy.path / "cost_tables.json").write_text("{")
    assert load_summary(copy).cost_sources == ()


def test_the_card_the_verdict_the_page_and_sql_tell_one_speedup_with_one_interval(finished: RunDir) -> None:
    summary, store = write_report(finished), finished.config().store
    card = {label: f"{value} ({remark})" for label, value, remark in key_numbers(summary)}
    page = finished.report_file.read_text()
    columns, found = query(store, "from v_run_summary")
    row = dict(zip(columns, found[0], strict=True))
    assert query(store, "select * exclude (run_id, baseline, num_batches) from v_speedup")[1] == [
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
    per_process = units.count(round(row["llm_tokens_per_s_per_process"]))
    assert f"median over steps; {per_process} per process" in card["LLM throughput, measured"]
    steps = {p.policy: (p.step_s, p.idle_frac) for p in summary.comparison.policies}
    for policy in ("arrival", "balanced"):
        assert (row[f"{policy}_step_s"], row[f"{policy}_idle_frac"]) == pytest.approx(steps[policy])
