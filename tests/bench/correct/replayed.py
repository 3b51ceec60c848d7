"""Ranks that train given StepPlans, one after the other: `python -m tests.bench.correct.replayed RUN_DIR SLOWNESS...`.

The plans lie in the run directory and may be of several contenders for the same global batches, so that steps of all of
them are measured within the same seconds, in one process each. The same file is the scheduler that publishes them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dflop.jobs import supervisor, train
from dflop.jobs.rundir import RunDir, open_run
from dflop.records import StepPlan, from_dict, to_dict
from dflop.train import wire
from dflop.train.wire import PlanMessage
from tests.jobs import slowed
from tests.jobs.training import set_config

START_PATIENCE_S = 60.0


def give_steps(run: RunDir, steps: Sequence[StepPlan]) -> None:
    """Make a run train these steps, numbered anew, and nothing else."""
    numbered = [dataclasses.replace(plan, step=step) for step, plan in enumerate(steps)]
    _file(run).write_text(json.dumps([to_dict(plan) for plan in numbered]))
    set_config(run, f"train.num_steps={len(steps)}")


def publish_all(run_path: str, _mode: str, _attempt: str, host: str, port: str, start: str) -> None:
    """Publish every plan at once, and live on: a scheduler that has ended would be started again."""
    run = open_run(run_path)
    store = wire.open_store(host, int(port), is_server=False, timeout_s=START_PATIENCE_S)
    for data in json.loads(_file(run).read_text()):
        wire.publish(store, PlanMessage(from_dict(StepPlan, data), {}, int(start)))
    wire.note_recorded(store, int(start), wire.NUM_SLOTS**4)
    signal.pause()


def _file(run: RunDir) -> Path:
    return run.path / "replayed.json"


if __name__ == "__main__":
    if "RANK" in os.environ and sys.argv[2:3] != ["train"]:
        supervisor.SCHEDULER_MODULE = "tests.bench.correct.replayed"
        train.START_PATIENCE_S = START_PATIENCE_S
        slowed.main(*sys.argv[1:])
    else:
        publish_all(*sys.argv[1:])
