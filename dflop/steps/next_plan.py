"""The plan for what a run trains next: of a stage that begins, or in place of the one whose job made way.

What is to be done next follows from what is on disk: journal, checkpoints, plan and its basis, and the mark of a job
that has to make way.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from dflop.config import Config
from dflop.errors import ConfigError
from dflop.launch import JobHandle, Launcher
from dflop.records import Decision, Plan, ProfileRecord
from dflop.run.batches import TRAIN, Stage, stage_at
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.run.plan_scope import basis_of
from dflop.run.queue import live_jobs
from dflop.run.training_claim import num_attempts, trainer_of
from dflop.steps import planning, replanning, submit
from dflop.steps.profiling import stored_profile
from dflop.steps.replanning import Advice


def live_job(run: RunDir, launcher: Launcher, mode: str = TRAIN) -> JobHandle | None:
    """The job that trains or compares which is queued or runs, whoever submitted it."""
    key = submit.train_key(run, mode)
    return next((handle for handle, _ in live_jobs(run, launcher) if handle.key == key), None)


def next_plan(
    run: RunDir, launcher: Launcher, advice: Advice | None, say: Say, model: ProfileRecord | None = None
) -> tuple[Plan, ...]:
    """Candidates for what comes next, the one to run first; the plan that the run has, alone, where it stays with it.

    `advice` is what its job was told to stop for; None if that is not known any more, then it is asked for again.
    `model` is the profile of its modules; None: the one that the store has to have.

    Raises:
        ConfigError: the run has no profiles yet.
        InfeasiblePlanError: no layout fits.
    """
    config, first_step = run.config(), run.next_step()
    stage = stage_at(config, first_step)
    plans: tuple[Plan, ...] = ()
    if trainer_of(run, TRAIN) is not None or live_job(run, launcher) is not None:
        return (run.plan(),)
    if not run.has_plan() or not _fits(run, stage):
        key = model.profile_key if model is not None else _profiled_key(run, config)
        if advice is not None:
            came_to_nothing(run, config, advice, f"stage `{stage.name}` begins with its own plan")
        old_id = run.plan().plan_id if run.has_plan() else ""
        plans = planning.plan_run(run, config, key, say, from_step=first_step or None)
        if first_step:
            _note_stage(run, config, stage, old_id, plans[0])
    elif run.is_replanning():
        advice = advice or _asked_again(run, config, say)
        if advice is not None:
            replanning.apply(run, config, advice)
            plans = advice.plans
    run.mark_replanning(False)
    if plans:
        say(f"plan: {plans[0].reason}")
    return plans or (run.plan(),)


def _profiled_key(run: RunDir, config: Config) -> str:
    """Key of the model profile, which must be complete, as must be the shapes in the run directory."""
    hint = "profile first; dflop train does all steps"
    if not (run.path / "shapes.parquet").is_file():
        raise ConfigError("the dataset of the run is not profiled yet", where=str(run.path), hint=hint)
    key, hardware, _ = planning.model_profile_key(config)
    if stored_profile(config.store, key) is None:
        raise ConfigError(f"the model is not profiled on {hardware} yet", where=str(config.store), hint=hint)
    return key


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


def came_to_nothing(run: RunDir, config: Config, advice: Advice, why: str) -> None:
    """Note that a plan which was decided on never ran."""
    decision = advice.decision
    failed = replace(decision, verdict=replanning.FAILED, detail=f"{why}: {decision.detail}", observed_at_s=time.time())
    replanning.spool_decision(run, config, failed)


def _note_stage(run: RunDir, config: Config, stage: Stage, old_id: str, plan: Plan) -> None:
    frozen = f"with {', '.join(stage.frozen)} frozen" if stage.frozen else "with nothing frozen"
    detail = f"stage `{stage.name}` begins, {frozen}, learning rate {stage.learning_rate:g}: {plan.reason}"
    attempt = num_attempts(run, TRAIN) + 1
    decision = Decision(
        run.run_id, attempt, stage.first_step, "stage", stage.name, replanning.DONE, math.nan, plan.predicted_step_s,
        math.nan, math.nan, stage.num_steps, old_id, plan.plan_id, detail, time.time(),
    )  # fmt: skip
    replanning.spool_decision(run, config, decision)
