"""One store, one answer: a run's plan, `dflop plan`, `dflop compare` and the sampler take the same corrections."""

import asyncio
import json
import time

import pytest

from dflop.compare.outlook import look_ahead
from dflop.config.sections import StageConfig
from dflop.errors import ConfigError, CostError
from dflop.records import LLM
from dflop.report.tables import layout_text
from dflop.sampler import sample_costs_from_store
from dflop.steps import planning
from dflop.store.reader import Reader
from dflop.units import seconds
from tests.builders import make_corrections, make_table
from tests.jobs.training import fresh, profiled, set_config
from tests.store.asking import fill
from tests.test_cli import dflop

HALF_LIFE_S = 14 * 86400.0


@pytest.fixture
def run(planned, tmp_path):
    """All profiles are complete; all samples of the store are the run's."""
    run = profiled(fresh(planned, tmp_path))
    set_config(run, "plan.microbatch_choices=[2]")
    key = planning.model_profile_key(run.config())[0]
    fill(run.config().store, make_table("audio", table_id="audio-tp1", profile_key=key), run_id="fit", producer="a")
    with Reader(run.config().store) as reader:
        run.write_shapes(reader.shapes(run.profile_key()))
    return run


def looked(run, config=None):
    """What a plan without a run is made for, and what was said."""
    lines = list[str]()
    config = config or run.config()
    return asyncio.run(look_ahead(config, "", config.cluster.spec(), lines.append)), lines


def test_a_plan_without_a_run_takes_the_corrections_that_the_run_takes_and_says_so(run):
    config, key = run.config(), planning.model_profile_key(run.config())[0]
    plain_s = planning.plan_run(run, config, key, lambda _: None)[0].predicted_step_s
    middle = sorted(s.num_llm_tokens for s in run.shapes())[len(run.shapes()) // 2]
    rows = make_corrections(
        LLM, (4.0, 9.0), (middle,), table_id="llm-tp1", observed_at_s=time.time() - HALF_LIFE_S, level=5.0
    )
    uncorrected = sample_costs_from_store(config.store).seconds
    fill(config.store, *rows, run_id="earlier")
    plan = planning.plan_run(run, config, key, lambda _: None)[0]
    assert plan.predicted_step_s > 1.5 * plain_s
    done = dflop("plan", str(run.config_file), "--json", cwd=run.path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[0])
    assert (shown["layout"], shown["step simulated"]) == (layout_text(plan), seconds(plan.predicted_step_s))
    assert shown["reason"] == plan.reason
    assert "Costs include corrections from earlier steps: `llm` " in done.stderr
    # What `dflop compare` judges by is the same problem.
    found, _ = looked(run)
    mine = planning.run_task(run, config, key, lambda _: None)
    assert found.problem.batches == mine.problem.batches
    assert found.problem.cost.corrections[LLM].factors == pytest.approx((2.0, 3.0), rel=1e-4)
    assert found.problem.cost.corrections[LLM].factors == pytest.approx(mine.basis.factors[0].factors, rel=1e-6)
    assert found.at(4).problem.cost.corrections[LLM].level != found.problem.cost.corrections[LLM].level
    assert "`llm` " in found.source
    # So does the sampler, whose ranks read one snapshot at different times.
    once, again = (sample_costs_from_store(config.store) for _ in range(2))
    assert once.key == again.key
    of_text = [i for i, s in enumerate(run.shapes()) if not s.items]
    times = once.seconds[of_text] / uncorrected[of_text]
    assert {round(float(x), 3) for x in times} == {2.0, 3.0}


def test_by_a_data_sheet_fp8_is_in_the_costs_of_both_sides_or_refused(run):
    train = run.config().train.model_copy(update={"fp8": "tensorwise", "compile": True})
    config = run.config().model_copy(update={"train": train})
    found = asyncio.run(look_ahead(config, "h100", config.cluster.spec(), lambda _: None))
    assert {(t.module == LLM, t.fp8) for t in found.task.costs.tables} == {(True, "tensorwise"), (False, "off")}
    assert "tensorwise FP8 in its layers" in found.source
    plain = asyncio.run(look_ahead(run.config(), "h100", config.cluster.spec(), lambda _: None))
    assert plain.source in found.source != plain.source
    ours, theirs = (cost.table(LLM) for cost in (found.problem.cost, found.compiled))
    assert (ours.fp8, theirs.fp8) == ("tensorwise", "tensorwise")
    assert ours.activation_bytes == theirs.activation_bytes, "experts are planned in the memory that they are judged by"
    with pytest.raises(ConfigError, match="A100-80G SXM has no FP8 matmuls"):
        asyncio.run(look_ahead(config, "a100", config.cluster.spec(), lambda _: None))


def test_of_several_stages_the_last_is_planned_for_on_the_batches_of_its_steps(run):
    stages = (StageConfig(name="first", num_steps=2), StageConfig(name="whole"))
    config = run.config().model_copy(update={"stages": stages})
    found, lines = looked(run, config)
    assert "planning for the last of 2 stages, `whole`" in lines
    key = planning.model_profile_key(config)[0]
    mine = planning.run_task(run, config, key, lambda _: None, from_step=2)
    assert found.problem.batches == mine.problem.batches
    assert found.task.basis == mine.basis


def test_corrections_that_are_off_and_costs_that_are_missing(run):
    config = run.config()
    fill(config.store, *make_corrections(LLM, (2.0,), table_id="llm-tp1", observed_at_s=time.time()), run_id="earlier")
    off = config.model_copy(update={"correct": config.correct.model_copy(update={"enabled": False})})
    assert looked(run)[0].problem.cost.corrections
    assert not looked(run, off)[0].problem.cost.corrections
    other = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(CostError, match="no cost tables of this model"):
        looked(run, other)


def test_adapters_are_planned_on_a_data_sheet_with_the_backward_pass_of_frozen_weights(run):
    set_config(run, "model.frozen=[vision, audio]")
    tables = []
    for lora in ("null", "{targets: {llm: [q_proj]}, rank: 1}"):
        set_config(run, f"train.lora={lora}")
        config = run.config()
        found = asyncio.run(look_ahead(config, "h100", config.cluster.spec(), lambda _: None))
        tables.append(found.task.problem.cost.table(LLM))
    weights, adapters = tables
    assert (weights.trains, adapters.trains) == ("all", "adapters")
    assert adapters.backward_s.layer_per_token < weights.backward_s.layer_per_token
    assert adapters.activation_bytes.edge_per_token < weights.activation_bytes.edge_per_token, "the head is frozen"
    assert found.workload.adapted == (LLM,)
