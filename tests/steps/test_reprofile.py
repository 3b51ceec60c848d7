"""Sizes that predictions are doubtful about: found in rows, timed by a real job, judged against the table."""

import dataclasses
import json

import numpy as np
import pytest

from dflop.config import Config
from dflop.cost.fit import fit_cost_tables
from dflop.errors import CostError
from dflop.jobs import model_profile
from dflop.learn.remeasure import DOUBTED, Doubt, find_doubts, judge, read_doubts, samples_of
from dflop.records import ALL_TOKENS, LLM, Correction, Decision, Measurement
from dflop.run.directory import RunDir
from dflop.steps.planning import model_profile_key
from dflop.steps.replanning import consider
from dflop.steps.submit import reprofile_jobs
from dflop.steps.training import doubtful, settle
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from tests.builders import make_decision, make_probe, make_sample, make_specs, make_table
from tests.jobs.training import fresh, set_config
from tests.store.asking import fill, write

TABLE = make_table(LLM, source="measured", per_sq_token_s=0.0)
LONG = Doubt(LLM, 1, False, False, ((600, ALL_TOKENS),), 1.8)


def correction(factor: float, low: int, high: int, *, sd: float = 0.02, at_s: float = 10.0, level: float = 1.0):
    return Correction("run", 20, LLM, TABLE.table_id, factor, 0.1, 50, at_s, low, high, sd, False, level)


def drift(subject: str = LLM, kind: str = "drift_cost") -> Decision:
    return make_decision(kind, "noticed", subject, step=20, attempt=1, measured=1.8, expected=1.0)


def test_sizes_far_from_the_level_of_a_drifting_module_are_doubtful():
    rows = [
        correction(1.5, 0, 100, level=1.5),
        correction(2.4, 100, 300, level=1.5),
        correction(2.7, 300, 600, level=1.5),
        correction(3.0, 600, 900, sd=1.0, level=1.5),  # may be anything
        correction(1.0, 900, ALL_TOKENS, level=1.5),
    ]
    old = [correction(9.0, 0, ALL_TOKENS, at_s=1.0)]
    (found,) = find_doubts([*old, *rows], [TABLE], [drift("llm of 100 to 299 tokens")])
    assert found.ranges == ((100, 600), (900, ALL_TOKENS))
    assert found.factor == pytest.approx((1.6 * 1.8 / 1.5) ** (1 / 3))
    assert found.subject == "llm of 100 to 599, 900 and more tokens"
    far = [correction(2.0, 0, ALL_TOKENS)]
    for rows, table, decisions in (
        (far, TABLE, [drift("vision")]),
        (far, TABLE, [drift(LLM, "drift_shapes")]),
        (far, dataclasses.replace(TABLE, source="derived"), [drift()]),
        (far, dataclasses.replace(TABLE, table_id="other"), [drift()]),
        ([correction(1.1, 0, ALL_TOKENS)], TABLE, [drift()]),
        ([correction(2.0, 0, ALL_TOKENS, level=2.0)], TABLE, [drift()]),
        ([], TABLE, [drift()]),
    ):
        assert find_doubts(rows, [table], decisions) == []


def test_samples_of_a_doubt_hold_nothing_else():
    shapes = [make_sample(i, 10 + 100 * i, [("vision", 50 * i + 50), ("vision", 400)]) for i in range(10)]
    long = samples_of(Doubt("vision", 1, False, False, ((100, 160), (300, 310)), 2.0), shapes)
    assert [[item.num_tokens for item in s.items] for s in long] == [[100], [150], [300]]
    assert {s.num_llm_tokens for s in samples_of(LONG, shapes)} == {
        s.num_llm_tokens for s in shapes if s.num_llm_tokens >= 600
    }


def probes(truth, lengths, group: str, *, times: float = 1.0) -> list[Measurement]:
    """Two depths, one or two samples of each length."""
    return [
        dataclasses.replace(
            make_probe(truth, depth, 10, count * length, count * length**2, noise=times), group=group, profile_key="p"
        )
        for depth in (2, 4)
        for length in lengths
        for count in (1, 2)
    ]


SPEC = make_specs()[-1]


@pytest.mark.parametrize(
    ("times", "words", "is_new"), [(1.03, "the cause is in the run", False), (1.8, "refitted", True)]
)
def test_probes_speak_for_the_table_or_give_one_that_is_right_about_them(times, words, is_new):
    old = probes(TABLE, range(50, 1300, 100), "random")
    (table,) = fit_cost_tables(old, [SPEC])
    new = probes(TABLE, np.arange(600, 1300, 100).tolist(), DOUBTED, times=times)
    found = judge(LONG, table, [*old, *new], SPEC)
    assert found.measured_s == pytest.approx(times * found.before_s, rel=0.03)
    assert [t.table_id != table.table_id for t in found.tables] == [True] * is_new
    assert words in found.detail
    if is_new:
        assert found.measured_s == pytest.approx(found.after_s, rel=0.15)
    with pytest.raises(CostError, match="no probe of llm of 600 and more tokens"):
        judge(LONG, table, [*old, *probes(TABLE, (50, 90), DOUBTED)], SPEC)


@pytest.fixture
def run(planned, tmp_path) -> RunDir:
    """It may time what it doubts, with small budgets."""
    run = fresh(planned, tmp_path)
    set_config(
        run, "model_profile.budget_s=1", "model_profile.num_probes=8", "model_profile.num_repeats=1",
        "replan.mode=act",
    )  # fmt: skip
    return run


def doubt_from(run: RunDir, num_tokens: int) -> None:
    """Steps have shown that samples take longer from so many tokens on."""
    rows = (correction(1.0, 0, num_tokens), correction(1.8, num_tokens, ALL_TOKENS))
    seen = (dataclasses.replace(row, run_id=run.run_id, table_id=f"{LLM}-tp1") for row in rows)
    fill(run.config().store, dataclasses.replace(drift(), run_id=run.run_id), *seen, run_id=run.run_id)


def replan_as(run: RunDir, **changes: object) -> Config:
    config = run.config()
    return config.model_copy(update={"replan": config.replan.model_copy(update=changes)})


def test_a_job_times_what_is_doubtful_and_settles_it_once(run):
    config = run.config()
    key, hardware, _ = model_profile_key(config)
    # A hundred times faster than any machine that runs this.
    tables = [
        make_table(
            t.module, fixed_s=1e-5, per_token_s=1e-8, edge_per_token_s=1e-8, per_sq_token_s=0.0, table_id=t.table_id,
            profile_key=key, hardware=hardware,
        )
        for t in run.cost_tables()
    ]  # fmt: skip
    run.write_plan(run.plan(), tables)
    write(config.store, *tables, run_id=run.run_id, producer="tables")
    lengths = sorted(s.num_llm_tokens for s in run.shapes())
    middle = lengths[len(lengths) // 2]
    doubt_from(run, middle)
    assert doubtful(run, replan_as(run, reprofile=False)) is None
    file = doubtful(run, config)
    (job,) = reprofile_jobs(run, config, file)
    assert (job.args[1:], job.resources.num_tasks) == ((key, hardware, "1", str(file)), 1)
    (doubt,) = read_doubts(file)
    assert doubt.ranges == ((middle, ALL_TOKENS),)
    # Once asked, not again, in whatever mode.
    assert doubtful(run, config) is None
    assert doubtful(run, replan_as(run, mode="advise")) is None

    counted = model_profile.again(str(run.path), key, hardware, "1", str(file))
    assert counted["num_measurements"] >= 12
    said: list[str] = []
    (decision,) = settle(run, config, file, said.append)
    with Reader(config.store) as reader:
        rows = reader.records(Measurement, where={"profile_key": key})
        newest = {t.table_id for t in reader.latest_cost_tables(key) if t.module == LLM and not t.recompute}
        stored = [d.detail for d in reader.decisions(run.run_id) if d.kind == "reprofile"]
    assert {(m.module, m.group) for m in rows} == {(LLM, DOUBTED)}
    assert min(m.sum_sq_tokens / m.num_tokens for m in rows) >= middle
    assert stored == [decision.detail]
    assert decision.verdict == "done"
    assert decision.measured > 5 * decision.expected
    assert decision.measured == pytest.approx(np.mean([m.forward_s + m.backward_s for m in rows]))
    assert newest != {f"{LLM}-tp1"}
    assert said == [f"reprofile: {decision.detail}"]
    # It is a reason to look for another plan; before a step was seen there is nothing to decide.
    assert consider(run, config, print) is None


def test_a_job_of_one_module_shares_the_budget_out_once(run, monkeypatch):
    asked = []
    monkeypatch.setattr(
        model_profile, "profile_model", lambda *_, budget_s, only, **__: asked.append((budget_s, only)) or []
    )
    model_profile.main(str(run.path), "key", "cpu", "1", LLM)
    assert asked == [(run.config().model_profile.budget_s, LLM)], "`profile_model` gives `only` its share"


def test_a_run_that_may_only_advise_times_nothing(run):
    doubt_from(run, 100)
    assert doubtful(run, replan_as(run, mode="advise")) is None
    ingest(run.config().store)
    with Reader(run.config().store) as reader:
        (found,) = [d for d in reader.decisions(run.run_id) if d.kind == "reprofile"]
    assert (found.verdict, found.measured) == ("advised", pytest.approx(1.8))
    assert json.loads((run.path / "doubts" / "1.json").read_text())[0]["module"] == LLM
