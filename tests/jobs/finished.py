"""A run directory and a store as a finished run leaves them, with records out of the real rooms but no process run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dflop.records import Plan, RankSpan, RunRecord, StepObservation, StepPlan
from dflop.report.summary import RunSummary
from dflop.run.directory import RunDir
from dflop.run.plan_scope import PlanBasis, write_basis
from dflop.store.ingest import ingest
from dflop.store.spool import SpoolWriter
from tests.builders import make_table
from tests.jobs.configs import make_config
from tests.jobs.made import run_of
from tests.report.detailed import SPLIT, batch_of, detailed, observe_step, plan_step, spans_of

TRACE_EVERY = 2


def finished_run(folder: Path, *, num_steps: int = 6) -> RunDir:
    """A run of `num_steps` steps and a comparison; every second step was traced in full."""
    processes = f"cluster.num_processes_per_node={SPLIT.num_processes}"
    config = make_config(folder, processes, "cluster.num_cores_per_node=64", f"train.num_steps={num_steps}")
    run = run_of(folder / "runs" / "small-1", config)
    summary = detailed(SPLIT, num_steps=1, num_batches=3, run_id=run.run_id)
    chosen = replace(summary.plan, run_id=run.run_id)
    write_basis(run, PlanBasis(chosen.plan_id, 0, 0, (), (), tuple(summary.terms)))
    run.write_plan(chosen, [make_table(m.module) for m in SPLIT.modules])
    shapes = [shape for number in range(6) for shape in batch_of(number)]
    run.write_shapes(shapes)
    with SpoolWriter(run.config().store, "data", "profile") as spool:
        for shape in shapes:
            spool.append(shape)
    train = train_records(run.run_id, num_steps)
    with SpoolWriter(run.config().store, run.run_id, "train") as spool:
        for record in (*_of_run(run, summary, chosen), *train):
            spool.append(record)
    assert summary.comparison is not None
    steps = [step for pair in summary.comparison.pairs for step in (*pair.arrival, *pair.balanced)]
    with SpoolWriter(run.config().store, f"{run.run_id}/compare", "compare") as spool:
        for record in summary.compare_plans:
            spool.append(record)
        for step in steps:
            for rank in step.ranks:
                spool.append(rank)
    ingest(run.config().store)
    return run


def train_records(run_id: str, num_steps: int) -> list[StepPlan | StepObservation | RankSpan]:
    """What training leaves in the spool."""
    found: list[StepPlan | StepObservation | RankSpan] = []
    at_s = 1010.0
    for step in range(num_steps):
        batch = batch_of(step % 6)
        step_plan = plan_step(SPLIT, batch, step, "balanced", run_id)
        seen = observe_step(SPLIT, step_plan, batch, started_at_s=at_s)
        found += [step_plan, *seen]
        if step % TRACE_EVERY == 0:
            found += [span for rank in seen for span in spans_of(SPLIT, rank)]
        at_s += 0.01 + seen[0].step_s
    return found


def _of_run(run: RunDir, summary: RunSummary, plan: Plan) -> list[Any]:
    run.write_state({"run_id": run.run_id, "state": "done"})
    states = [
        RunRecord(run.run_id, "small", "key", state, "cpu", "torch", "abc", str(run.path), at_s)
        for state, at_s in (("running", 1000.0), ("done", 2000.0))
    ]
    inputs = [replace(seen, job=job) for seen in summary.inputs for job in ("plan", "train")]
    others = [replace(plan, candidate_rank=i, plan_id=f"p{i}") for i in (1, 2)]
    mine = (*summary.correction_rows, *summary.rank_factors, *summary.peaks, *summary.jobs)
    return [*states, *inputs, plan, *others, *(replace(record, run_id=run.run_id) for record in mine)]
