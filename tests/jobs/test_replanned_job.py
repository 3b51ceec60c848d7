"""A real job that makes way for another plan: its losses are those of a job nobody stopped."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from dflop.jobs import replan, submit
from dflop.jobs.continuing import Todo, live_job, plan_next, train_once, what_next
from dflop.jobs.replan import Advice
from dflop.jobs.rounds import Teller
from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import TRAIN
from dflop.launch import Journal
from dflop.records import LLM, Decision, StepObservation
from dflop.store.reader import Reader
from dflop.store.spool import read_spool
from dflop.train.manifest import read_latest
from tests.jobs.slow_steps import with_slow_steps
from tests.jobs.training import fresh, give_plan, losses_of, planned_run, run_ranks
from tests.train.synthetic import make_inline_plan

NUM_STEPS, CHECKPOINT_EVERY = 24, 10

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> RunDir:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    settings = ("replan.mode=act", "replan.check_every_s=0.2", f"train.checkpoint_every={CHECKPOINT_EVERY}")
    return planned_run(tmp_path_factory.mktemp("job"), f"train.num_steps={NUM_STEPS}", *settings)


async def drive(run: RunDir, say) -> None:
    """What the flow does."""
    launcher, advice = submit.launcher_of(run, run.config()), None

    async def show() -> None:
        """Nobody."""

    teller = Teller(run, say, show)
    while (todo := what_next(run, launcher)) is not Todo.NOTHING:
        if todo is Todo.PLAN:
            plan_next(run, "key", advice, say)
            await teller.tell()
        else:
            advice = await train_once(run, launcher, say, teller)


def test_a_run_goes_on_under_another_plan_and_loses_nothing(planned, tmp_path, monkeypatch):
    straight, run = fresh(planned, tmp_path / "straight"), fresh(planned, tmp_path / "replanned")
    assert run_ranks(straight, "dflop.jobs.train", str(straight.path), TRAIN).codes == (0, 0)
    new = make_inline_plan([{"vision": 4, LLM: 2}, {LLM: 4}], dp=1, num_microbatches=4)
    decided: list[Decision] = []

    def consider(run: RunDir, _config: object, _say: object) -> Advice | None:
        """Once, behind the third step that is in the store: then another plan pays."""
        with Reader(run.config().store) as reader:
            steps = [o.step for o in reader.records(StepObservation, where={"run_id": run.run_id})]
        if decided or max(steps, default=0) < 2:
            return None
        numbers = {"measured": math.nan, "expected": math.nan, "gain_s": 9.0, "cost_s": 1.0, "num_steps_left": 9}
        about = {"kind": "replan", "subject": "inline", "verdict": "done", "detail": "as the test wants it"}
        at = {"attempt": 1, "step": max(steps), "observed_at_s": time.time()}
        decided.append(Decision(run.run_id, plan_id="old", new_plan_id="new", **numbers, **about, **at))
        return Advice(decided[0])

    def apply(run: RunDir, config: object, advice: Advice) -> None:
        assert live_job(run, submit.launcher_of(run, run.config())) is None
        give_plan(run, new)
        replan.spool_decision(run, run.config(), advice.decision)

    monkeypatch.setattr(submit, "train_job", with_slow_steps(submit.train_job))
    monkeypatch.setattr(replan, "consider", consider)
    monkeypatch.setattr(replan, "apply", apply)
    lines: list[str] = []
    asyncio.run(drive(run, lines.append))

    seen = list(read_spool(run.config().store, StepObservation))
    attempts = {o.step: o.attempt for o in seen}
    first_again = min(step for step, attempt in attempts.items() if attempt == 2)
    assert decided[0].step < first_again < NUM_STEPS, "the plan was not changed midway"
    assert sorted((o.step, o.rank) for o in seen) == [(t, r) for t in range(NUM_STEPS) for r in (0, 1)], "once each"
    assert {o.module for o in seen if o.attempt == 1} > {o.module for o in seen if o.attempt == 2}
    assert losses_of(run) == pytest.approx(losses_of(straight), rel=1e-5)
    assert read_latest(run.checkpoints)["next_step"] == NUM_STEPS
    states = [r.state for r in Journal(run.path, run.run_id).records()]
    assert [s for s in states if s != "queued"] == ["running", "interrupted", "running", "done"]
    assert any("as the test wants it" in line for line in lines)
    restart_s = min(o.observed_at_s for o in seen if o.attempt == 2) - decided[0].observed_at_s
    print(f"{restart_s:.1f} s from the decision to the end of the first step under the new plan")
