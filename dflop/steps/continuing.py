"""Training as a row of jobs: one for every stage, and another for every plan that is decided on while one runs.

What is to be done next follows from what is on disk (journal, checkpoints, plan and its basis, a mark), so that whoever
dies in between, the next `dflop run` goes on. `plan.json` changes only while no training job runs: ranks and schedulers
that start anew read it. A job that has to make way for another plan is marked, told to stop, and waited for; then
the plan is changed, the mark taken away, and the job submitted again.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from enum import Enum

from dflop.config import Config
from dflop.errors import Interrupted, LaunchError, TrainError
from dflop.launch import JobHandle, JobState, Journal, Launcher
from dflop.records import Decision, Plan
from dflop.run.batches import TRAIN, Stage, stage_at
from dflop.run.console import Say
from dflop.run.directory import RunDir
from dflop.run.plan_scope import basis_of
from dflop.steps import planning, replanning, submit
from dflop.steps.follow import follow_job
from dflop.steps.replanning import Advice
from dflop.steps.rounds import Rounds, Teller
from dflop.train.manifest import read_latest


class Todo(Enum):
    """What a run's training needs next."""

    PLAN = "plan"
    TRAIN = "train"
    NOTHING = "nothing"


def what_next(run: RunDir, launcher: Launcher) -> Todo:
    """What is to be done: wait for a job that still runs, make a plan, start a job, or nothing."""
    config = run.config()
    if live_job(run, launcher) is not None:
        return Todo.TRAIN
    if next_step(run) >= config.train.num_steps:
        return Todo.NOTHING
    is_planned = run.has_plan() and _fits(run, stage_at(config, next_step(run)))
    return Todo.TRAIN if is_planned and not run.is_replanning() else Todo.PLAN


def live_job(run: RunDir, launcher: Launcher) -> JobHandle | None:
    """The training job of the run that is queued or runs, whoever submitted it."""
    journal = Journal(run.path, run.run_id)
    handle = journal.live(submit.train_key(run, TRAIN))
    if handle is None or handle.backend != launcher.backend:
        return None
    status = launcher.poll(handle)
    if not status.state.is_final:
        return handle
    journal.changed(handle, status)
    return None


def next_step(run: RunDir) -> int:
    """First step that the newest checkpoint does not hold."""
    latest = read_latest(run.checkpoints)
    return int(latest["next_step"]) if latest else 0


def plan_next(run: RunDir, profile_key: str, advice: Advice | None, say: Say) -> tuple[Plan, ...]:
    """The plan for what comes next: for a stage that begins, or in place of the one whose job was told to stop.

    Args:
        run: None of its training jobs runs.
        profile_key: Model profile.
        advice: What its job was told to stop for; None if that is not known any more, then advice is asked for again.
        say: Told what happens.

    Returns:
        Candidates, the one to run first; empty if the run stays with its plan.
    """
    config, first_step = run.config(), next_step(run)
    stage = stage_at(config, first_step)
    plans: tuple[Plan, ...] = ()
    if not run.has_plan() or not _fits(run, stage):
        if advice is not None:
            _came_to_nothing(run, config, advice, f"stage `{stage.name}` begins and has a plan of its own")
        old_id = run.plan().plan_id if run.has_plan() else ""
        plans = planning.plan_run(run, config, profile_key, say, from_step=first_step or None)
        if first_step:
            _note_stage(run, config, stage, old_id, plans[0])
    elif run.is_replanning():
        advice = advice or _asked_again(run, config, say)
        if advice is not None:
            replanning.apply(run, config, advice)
            plans = advice.plans
    run.mark_replanning(False)
    return plans


def _fits(run: RunDir, stage: Stage) -> bool:
    """Whether the run's plan was made for a stage: reused then, whenever the run is taken up again."""
    basis = basis_of(run)
    return basis.frozen == stage.frozen and stage_at(run.config(), basis.from_step).index == stage.index


def _asked_again(run: RunDir, config: Config, say: Say) -> Advice | None:
    """What the job has made way for, where whoever knew has died; None if it would not pay any more."""
    advice = replanning.advise_now(run, config, say)
    if advice is None or advice.decision.verdict != replanning.ADVISED:
        return None
    return replace(advice, decision=replace(advice.decision, verdict=replanning.DONE))


def _came_to_nothing(run: RunDir, config: Config, advice: Advice, why: str) -> None:
    decision = advice.decision
    failed = replace(decision, verdict=replanning.FAILED, detail=f"{why}: {decision.detail}", observed_at_s=time.time())
    replanning.spool_decision(run, config, failed)


def _note_stage(run: RunDir, config: Config, stage: Stage, old_id: str, plan: Plan) -> None:
    frozen = f"with {', '.join(stage.frozen)} frozen" if stage.frozen else "with nothing frozen"
    detail = f"stage `{stage.name}` begins, {frozen}, learning rate {stage.learning_rate:g}: {plan.reason}"
    decision = Decision(
        run_id=run.run_id,
        attempt=run.num_attempts(TRAIN) + 1,
        step=stage.first_step,
        kind="stage",
        subject=stage.name,
        verdict=replanning.DONE,
        measured=math.nan,
        expected=plan.predicted_step_s,
        gain_s=math.nan,
        cost_s=math.nan,
        num_steps_left=stage.num_steps,
        plan_id=old_id,
        new_plan_id=plan.plan_id,
        detail=detail,
        observed_at_s=time.time(),
    )
    replanning.spool_decision(run, config, decision)


async def train_once(run: RunDir, launcher: Launcher, say: Say, teller: Teller) -> Advice | None:
    """Follows the training job, adopted or submitted, until it has ended or made way for another plan.

    Returns:
        What it made way for, if that was decided here.

    Raises:
        Interrupted: somebody else told it to stop.
        LaunchError: it failed.
        TrainError: it did nothing although there is something to do.
    """
    config = run.config()
    rounds = Rounds(run, launcher, say, teller)
    spec = submit.train_job(run, config, TRAIN, run.plan().num_processes)
    every_s = config.replan.check_every_s
    try:
        results = await follow_job(run, launcher, spec, say, meanwhile=rounds.round, every_s=every_s)
    except (Interrupted, LaunchError):
        if not (run.is_replanning() and _has_made_way(run)):
            raise
        say("the job has made way for another plan")
    else:
        had_nothing_to_do = results[0]["first_step"] == results[0]["num_steps"]
        if had_nothing_to_do and next_step(run) < results[0]["num_steps"]:
            raise TrainError(
                f"the job trained to step {results[0]['num_steps']}, the newest checkpoint seen here is of step "
                f"{next_step(run)}",
                where=str(run.checkpoints),
                hint="make the run directory look the same from where jobs run and from here",
            )
        if run.is_replanning() and next_step(run) >= config.train.num_steps:
            # It was at its last steps when it was told, and had no need to stop.
            if rounds.advice is not None:
                _came_to_nothing(run, config, rounds.advice, "training ended first")
            run.mark_replanning(False)
    finally:
        await rounds.close()
    await teller.tell()
    return rounds.advice


def _has_made_way(run: RunDir) -> bool:
    """The last job stopped as it was told to, or was still in the queue when it was."""
    key = submit.train_key(run, TRAIN)
    last = [r for r in Journal(run.path, run.run_id).records() if r.job_key == key][-1]
    return last.state in (JobState.INTERRUPTED, JobState.CANCELLED)
