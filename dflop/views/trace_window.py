"""`dflop trace`: some steps of a run as a Chrome trace, out of the newest snapshot of its store."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop import files
from dflop.errors import ConfigError
from dflop.records import Plan, RankSpan, StepObservation, StepPlan
from dflop.report.chrome_trace import TracedStep, chrome_trace
from dflop.report.observed_steps import MeasuredStep, measured_steps
from dflop.report.predicted import fits, plan_that_ran
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.store import console
from dflop.store.reader import Reader

NUM_STEPS = 20
"""Steps of a trace by default: the last ones."""
MANY_EVENTS = 1_000_000
"""Viewers become slow beyond."""
SUFFIXES = (".json", ".json.gz")


@dataclass(frozen=True, slots=True)
class Traced:
    """What was written."""

    path: Path
    first_step: int
    last_step: int
    num_steps: int
    num_predicted: int
    """Steps that have a predicted track."""
    num_events: int
    num_bytes: int


def write_trace(run: RunDir, out: Path | None = None, *, job: str = TRAIN, window: str | None = None) -> Traced:
    """Writes the trace of a window of steps; the file appears when it is complete.

    Args:
        run: Run directory.
        out: `.json` or `.json.gz`; None: trace.json in the run directory.
        job: `train` or `compare`.
        window: `A:B`, steps from A up to but not including B, counted from 0, each may be left out; `A` alone: that
            step; None: the last `NUM_STEPS`, fewer where so many would be more than `MANY_EVENTS`.

    Raises:
        ConfigError: the window is none, holds no step that was observed, or the file has another suffix.
        StoreError: nothing was published yet.
        OSError: the file cannot be written.
    """
    path = run.path / "trace.json" if out is None else out
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"cannot write a trace as `{path.name}`", hint=f"valid endings: {', '.join(SUFFIXES)}")
    config = run.config()
    run_id = run.run_id if job == TRAIN else f"{run.run_id}/{job}"
    with Reader(config.store) as reader:
        plans = _plans(reader, run.run_id, config.store)
        observed = np.unique(reader.arrays("v_step", ["step"], where={"run_id": run_id})["step"])
        chosen = choose_steps(observed.tolist(), window, most=_default_steps([plan for _, plan in plans]))
        steps = _traced_steps(reader, run_id, chosen, plans)
    cluster = config.cluster.spec()
    content = chrome_trace(run_id, steps, cluster.max_concurrency if cluster.device == "cpu" else None)
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    files.replace(path, gzip.compress(text.encode(), mtime=0) if path.name.endswith(".gz") else text)
    predicted = {e["args"]["step"] for e in content["traceEvents"] if e.get("cat") == "predicted"}
    return Traced(
        path,
        first_step=steps[0].measured.step,
        last_step=steps[-1].measured.step,
        num_steps=len(steps),
        num_predicted=len(predicted),
        num_events=len(content["traceEvents"]),
        num_bytes=path.stat().st_size,
    )


def choose_steps(observed: Sequence[int], window: str | None, most: int = NUM_STEPS) -> list[int]:
    """Observed steps that a window names, ascending; see `write_trace`.

    Args:
        observed: Steps of the run.
        window: As a person writes it; None: the last `most`.
        most: Without a window.

    Raises:
        ConfigError: the window cannot be read, or none of the steps is in it.
    """
    steps = sorted(observed)
    if not steps:
        raise ConfigError("no step of this run is in the store", hint="ingest its rows: dflop store ingest")
    if window is None:
        return steps[-most:]
    found = re.fullmatch(r"(\d*)(:?)(\d*)", window.strip())
    if found is None or not window.strip():
        raise ConfigError(f"cannot read the steps `{window}`", where="--steps", hint="write 100:120, 100:, :20 or 100")
    first, end = int(found[1] or 0), int(found[3] or steps[-1] + 1) if found[2] else int(found[1]) + 1
    chosen = [step for step in steps if first <= step < end]
    if not chosen:
        raise ConfigError(
            f"no step of `{window}` was observed",
            where="--steps",
            hint=f"the store has {len(steps)} steps of this run, {steps[0]} to {steps[-1]}; A:B excludes B",
        )
    return chosen


def _default_steps(plans: Sequence[Plan]) -> int:
    """As many of the last steps as make a trace that viewers open with ease."""
    # Of a microbatch: wait, compute and hand-over in both directions, the two predicted, two ends of an arrow each.
    each = max((plan.num_processes * (12 * plan.num_microbatches + 10) for plan in plans), default=1)
    return min(NUM_STEPS, max(1, MANY_EVENTS // each))


def _plans(reader: Reader, run_id: str, store: Path) -> list[tuple[int, Plan]]:
    """(first step, plan) of the plans that a run ran under, in order."""
    sql = "select plan_id, step from v_run_plan where run_id = $run_id order by number"
    _, rows = console.query(store, sql, {"run_id": run_id})
    plans = {p.plan_id: p for p in reader.records(Plan, where={"run_id": run_id, "candidate_rank": 0})}
    return [(step or 0, plans[plan_id]) for plan_id, step in rows if plan_id in plans]


def _traced_steps(
    reader: Reader, run_id: str, chosen: Sequence[int], plans: Sequence[tuple[int, Plan]]
) -> list[TracedStep]:
    where: dict[str, str | list[int]] = {"run_id": run_id, "step": list(chosen)}
    measured = measured_steps(reader.records(StepObservation, where=where))
    step_plans, spans = defaultdict[int, list[StepPlan]](list), defaultdict[tuple[int, int], list[RankSpan]](list)
    for step_plan in reader.records(StepPlan, where=where):
        step_plans[step_plan.step].append(step_plan)
    for span in reader.records(RankSpan, where=where):
        spans[span.step, span.attempt].append(span)
    found = []
    for step in measured:
        ran = plan_that_ran(step_plans[step.step], step.predicted_step_s)
        own = spans[step.step, step.ranks[0].attempt]
        found.append(TracedStep(step, _layout(step, ran, plans), ran, tuple(own)))
    return found


def _layout(step: MeasuredStep, step_plan: StepPlan | None, plans: Sequence[tuple[int, Plan]]) -> Plan | None:
    """The plan that a step ran under: of those that can have been, the last that began before it.

    A plan is dated by the step at which it was decided for, which is some steps before the one it began with.
    """
    possible = [
        (first, plan)
        for first, plan in plans
        if plan.num_processes == len(step.ranks) and (step_plan is None or fits(plan, step_plan))
    ]
    begun = [plan for first, plan in possible if first <= step.step]
    return begun[-1] if begun else (possible[0][1] if possible else None)
