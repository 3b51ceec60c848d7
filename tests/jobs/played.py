"""Jobs that are played, for tests of what comes next."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import uuid
from pathlib import Path

from dflop.errors import Interrupted, LaunchError
from dflop.launch import JobHandle, JobSpec, JobState, JobStatus, Journal
from dflop.launch.job import CHECKPOINTED, make_folder
from dflop.records import LLM, Decision
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.steps import submit, training
from dflop.steps.follow import Listener
from dflop.steps.replanning import Advice
from tests.builders import make_decision, make_plan
from tests.jobs.configs import make_config
from tests.jobs.made import run_of
from tests.launch.helpers import OneByOne
from tests.store.spooled import read_spool

PLANS = [
    dataclasses.replace(make_plan({"vision": 1, LLM: 1}, num_microbatches=n), plan_id=f"plan-{n}", reason=f"for {n}")
    for n in (2, 4)
]
STAGES = "stages=[{name: projector, num_steps: 4, frozen: [llm]}, {name: all}]"


def configured_run(tmp_path: Path, *overrides: str) -> RunDir:
    """A run of ten steps without a plan."""
    settings = ("train.num_steps=10", "replan.check_every_s=0.01", "replan.mode=act", *overrides)
    return run_of(tmp_path / "runs" / "small-1", make_config(tmp_path, *settings))


class PlayedLauncher(OneByOne):
    """Its jobs are in whatever state a test gives them; those that are told to stop do so when they are told again."""

    backend = "played"

    def __init__(self, state: JobState = JobState.RUNNING) -> None:
        self.state, self.told = {}, 0
        self.first_state, self.values = state, [{"first_step": 0, "num_steps": 10}]

    def submit(self, spec: JobSpec) -> JobHandle:
        handle = JobHandle("played", uuid.uuid4().hex, spec.name, spec.key, make_folder(spec.folder), 1, 0.0)
        self.state[handle.job_id] = self.first_state
        return handle

    def poll(self, handle: JobHandle) -> JobStatus:
        return JobStatus(self.state[handle.job_id])

    def interrupt(self, handle: JobHandle) -> None:
        self.told += 1
        if self.told > 1 and not self.state[handle.job_id].is_final:  # the first time it did not hear
            queued = self.state[handle.job_id] is JobState.QUEUED
            self.state[handle.job_id] = JobState.CANCELLED if queued else JobState.INTERRUPTED

    def cancel(self, *handles: JobHandle) -> None:
        for handle in handles:
            assert not self.state[handle.job_id].is_final
            self.state[handle.job_id] = JobState.CANCELLED

    def collect(self, handle: JobHandle) -> list[dict[str, int]]:
        state = self.state[handle.job_id]
        if state is JobState.INTERRUPTED:
            raise Interrupted(CHECKPOINTED)
        if state is not JobState.DONE:
            raise LaunchError(f"the job is {state}")
        return self.values


def submitted(run: RunDir, launcher: PlayedLauncher) -> JobHandle:
    """A job of a driver that died right afterwards."""
    handle = launcher.submit(submit.train_job(run, run.config(), TRAIN, 1))
    Journal(run.path, run.run_id).submitted(handle)
    return handle


def decision(verdict: str, at_s: float = math.inf) -> Decision:
    plans = {"plan_id": "plan-2", "new_plan_id": "plan-4", "gain_s": 9.0, "cost_s": 1.0, "detail": ""}
    return make_decision("replan", verdict, "layout", step=3, run_id="small-1", **plans, observed_at_s=at_s)


def advice(verdict: str) -> Advice:
    return Advice(decision(verdict), plans=(PLANS[1],))


def decisions(run: RunDir) -> list[Decision]:
    return list(read_spool(run.config().store, Decision))


def train(run: RunDir, launcher: PlayedLauncher, say=str) -> Advice | None:
    return asyncio.run(training.train(run, launcher, Listener(say))).advice
