"""When another plan is worth a restart: on a planned run whose rows are written by hand."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from dflop.cli.outputs import replan as replan_command
from dflop.config import Config
from dflop.errors import ConfigError
from dflop.records import LLM, Correction, Decision, JobRecord, Plan, RankFactor, RankSpan, StepObservation
from dflop.run.directory import RunDir
from dflop.run.plan_scope import basis_of
from dflop.steps.follow import LOCAL_POLL_S
from dflop.steps.planning import plan_run
from dflop.steps.replanning import advise_now, apply, consider, progress_of, restart_cost_s
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from tests.builders import make_decision
from tests.jobs.training import fresh, set_config
from tests.store.asking import fill

NUM_STEPS, NUM_SEEN = 1200, 30
STEP_S = 2.0
STARTED_S, START_UP_S, CHECKPOINT_S = 1_700_000_000.0, 9.0, 1.5


@pytest.fixture(scope="module")
def trained(planned, tmp_path_factory) -> RunDir:
    """A run on two of four processes, thirty steps into its training."""
    run = fresh(planned, tmp_path_factory.mktemp("replan"))
    of_plan = ("plan.microbatch_choices=[4]", "plan.share_ranks=[false]", "plan.top=2", "plan.num_scenarios=1")
    set_config(run, f"train.num_steps={NUM_STEPS}", "replan.mode=act", *of_plan)
    write(
        run,
        *(job(run, "job-1", state, STARTED_S + at_s) for state, at_s in (("queued", 0), ("running", 30))),
        *(observation(run, step, rank, m) for step in range(NUM_SEEN) for rank, m in enumerate(("vision", LLM))),
        *(RankSpan(run.run_id, 1, 20, rank, LLM, 0, 0, 0, "checkpoint", -1, 0.0, s, 0)
          for rank, s in enumerate((CHECKPOINT_S, 0.5))),
    )  # fmt: skip
    return run


@pytest.fixture
def run(trained, tmp_path) -> RunDir:
    return fresh(trained, tmp_path)


def job(run: RunDir, job_id: str, state: str, at_s: float) -> JobRecord:
    return JobRecord(run.run_id, "train", f"{run.run_id}/train", "local", job_id, state, "", "", 2, 0, at_s)


def observation(run: RunDir, step: int, rank: int, module: str, attempt: int = 1) -> StepObservation:
    ended_s = STARTED_S + START_UP_S + (step + 1) * STEP_S
    return StepObservation(
        run.run_id, attempt, step, "balanced", rank, module, 0, 0, STEP_S / 1.25, STEP_S, STEP_S, 0.0, 0.0, 0.0, 0.0,
        1.0, 1.0, 100, ended_s, (),
    )  # fmt: skip


def noticed(run: RunDir, kind: str = "drift_shapes", step: int = 25, subject: str = "vision") -> Decision:
    known = {"run_id": run.run_id, "attempt": 1, "plan_id": run.plan().plan_id, "observed_at_s": STARTED_S + 100}
    return make_decision(kind, "noticed", subject, step=step, detail=f"{subject} changed", **known)


def store_of(run: RunDir) -> Path:
    """Without the time that its configuration takes to be read."""
    return run.path.parents[1] / "store"


def write(run: RunDir, *rows: object) -> None:
    fill(store_of(run), *rows, run_id=run.run_id, producer="by-hand")


def rules(run: RunDir, **changes: object) -> Config:
    config = run.config()
    return config.model_copy(update={"replan": config.replan.model_copy(update=changes)})


def replans(run: RunDir) -> list[Decision]:
    ingest(store_of(run))
    with Reader(store_of(run)) as reader:
        return [d for d in reader.decisions(run.run_id) if d.kind == "replan"]


def test_a_plan_that_saves_more_than_a_restart_costs_runs_from_now_on(run):
    old, said = run.plan(), []
    assert consider(run, run.config(), print) is None, "nothing was noticed"
    write(run, noticed(run))
    for changes in ({"mode": "off"}, {"min_steps": NUM_SEEN + 1}, {"max_replans": 0}):
        assert consider(run, rules(run, **changes), print) is None
    assert replans(run) == [], "it was not answered: once the rules allow it, it is"
    advice = consider(run, run.config(), said.append)
    found = advice.decision
    assert (advice.is_to_act, found.verdict, found.plan_id) == (True, "done", old.plan_id)
    # Four processes instead of two: faster, and four fifths of a measured step are in the simulation.
    assert found.expected < found.measured
    assert found.num_steps_left == NUM_STEPS - NUM_SEEN
    ratio = STEP_S / (STEP_S / 1.25 + old.sync_s)
    assert found.gain_s == pytest.approx((found.measured - found.expected) * ratio * (NUM_STEPS - NUM_SEEN))
    assert found.cost_s == pytest.approx(START_UP_S + CHECKPOINT_S + LOCAL_POLL_S)
    assert found.gain_s > found.cost_s
    assert "vision changed" in found.detail
    assert "1170 steps left save" in found.detail
    assert len(said) == 1
    # Nothing is changed until the job has ended.
    assert run.plan() == old
    assert replans(run) == []
    apply(run, run.config(), advice)
    assert run.plan().plan_id == found.new_plan_id != old.plan_id
    assert json.loads((run.path / "plans" / "plan-1.json").read_text())["plan_id"] == old.plan_id
    assert {t.table_id for t in run.cost_tables()} == set(run.plan().table_ids)
    assert (basis_of(run).from_step, basis_of(run).num_steps) == (NUM_SEEN, NUM_STEPS - NUM_SEEN)
    assert [d.new_plan_id for d in replans(run)] == [found.new_plan_id]
    with Reader(store_of(run)) as reader:
        plans = reader.records(Plan, where={"run_id": run.run_id, "candidate_rank": 0})
    assert [p.plan_id for p in plans] == [found.new_plan_id]
    # The new plan has not run for long enough.
    write(run, noticed(run, step=29))
    assert consider(run, run.config(), print) is None
    write(run, *(observation(run, step, 0, LLM) for step in range(NUM_SEEN, NUM_STEPS)))
    assert advise_now(run, run.config(), print).decision.detail.startswith(
        "replan check: keep current plan, no steps left"
    )


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"restart_cost_s": 1e6}, "stay", "a restart costs 277 h"),
        ({"min_gain_frac": 0.99}, "stay", "less than 99.0 %"),
        ({"mode": "advise"}, "advised", "1170 steps left save"),
    ],
)
def test_rules_under_which_the_run_stays_until_there_is_another_reason(run, changes, verdict, words):
    write(run, noticed(run))
    before = run.plan()
    advice = consider(run, rules(run, **changes), print)
    assert (advice.is_to_act, advice.decision.verdict) == (False, verdict)
    assert words in advice.decision.detail
    assert [d.verdict for d in replans(run)] == [verdict]
    assert run.plan() == before
    assert consider(run, run.config(), print) is None
    if verdict == "advised":
        write(run, noticed(run, "drift_cost", 28, "llm of 100 to 199 tokens"))
        assert consider(run, run.config(), print).is_to_act


def test_the_best_plan_stays(run):
    config = run.config()
    plan_run(run, config, "model", lambda line: None, from_step=NUM_SEEN)
    write(run, noticed(run))
    advice = consider(run, config, print)
    assert advice.decision.verdict == "stay"
    assert advice.decision.new_plan_id == run.plan().plan_id
    assert "still the best for" in advice.decision.detail


def test_restarts_cost_what_this_run_s_own_took_and_without_a_measured_one_nothing_is_risked(run):
    # A second start, 60 s after its job; a third one of the same job, which Slurm requeued, does not count.
    rows = [job(run, "job-2", "queued", STARTED_S + 1000)]
    for attempt, delay_s in ((2, 60.0), (3, 500.0)):
        first = observation(run, 30, 0, LLM, attempt)
        rows.append(dataclasses.replace(first, observed_at_s=STARTED_S + 1000 + delay_s + STEP_S))
    write(run, *rows)
    with Reader(store_of(run)) as reader:
        progress = progress_of(reader, run.run_id, 0.0)
        cost_s = restart_cost_s(reader, run.run_id, progress)
        unknown = restart_cost_s(reader, run.run_id, dataclasses.replace(progress, started_at_s={1: STARTED_S - 1}))
    assert math.isnan(unknown)
    assert (progress.attempt, progress.step) == (3, 30)
    assert cost_s == pytest.approx((START_UP_S + 60) / 2 + CHECKPOINT_S)


def test_what_the_run_has_measured_of_sizes_and_ranks_is_so_under_any_plan(run):
    """Sizes that take four times as long, and a rank that takes three times as long."""
    write(run, noticed(run, "slow_rank", subject="rank 1"))
    config, at_s = run.config(), STARTED_S + 90  # some years ago
    config = config.model_copy(update={"correct": config.correct.model_copy(update={"half_life_days": 1e6})})
    plain = advise_now(run, config, print).decision
    write(run, Correction(run.run_id, 20, LLM, "llm-tp1", 4.0, 0.0, 100, at_s, 0, 2**53, 0.01, True, 4.0))
    sizes = advise_now(run, config, print)
    assert sizes.decision.measured > 1.5 * plain.measured
    assert sizes.decision.expected > 1.5 * plain.expected
    assert "`llm` 4.00x" in sizes.plans[0].reason
    write(run, RankFactor(run.run_id, 1, 20, 1, LLM, 0, 0, "here", 3.0, 0.05, True, at_s))
    rank = advise_now(run, config, print).decision
    assert rank.measured > 1.5 * sizes.decision.measured
    assert rank.expected > sizes.decision.expected
    assert "rank 1 3.00x" in rank.detail


def test_the_command_prints_the_advice_and_refuses_what_has_not_begun(run, capsys):
    replan_command(str(run.path), as_json=True)
    said = capsys.readouterr()
    (found,) = [json.loads(line) for line in said.out.splitlines()]
    assert (found["verdict"], found["plan"], found["step"]) == ("advised", "vision dp1 | llm pp1 dp1", NUM_SEEN - 1)
    assert found["gain_s"] > found["cost_s"] == pytest.approx(START_UP_S + CHECKPOINT_S + LOCAL_POLL_S)
    assert "a new plan would pay" in said.err
    assert replans(run) == []
    (run.path / "plan.json").unlink()
    with pytest.raises(ConfigError, match="no step of this run's training") as caught:
        replan_command(str(run.path))
    assert caught.value.exit_code == 2
