"""Timing again, beside the training, what predictions are doubtful about: when, and what becomes of it.

The flow asks `doubtful` after each ingest, submits a job per tensor-parallel degree
(`dflop.jobs.model_profile:again`), and hands what it leaves to `settle`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from dflop.config import Config
from dflop.correct.drift_detector import DRIFT_COST
from dflop.errors import CostError
from dflop.learn.remeasure import Doubt, find_doubts, judge, new_doubts, read_doubts, write_doubts
from dflop.records import Correction, CostTable, Decision, Measurement, ProfileRecord
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.steps.planning import bound_family
from dflop.steps.replanning import ADVISED, DONE, FAILED, REPROFILE, STAY, spool_decision
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter


@dataclass(frozen=True, slots=True)
class Reprofile:
    """What to submit: per degree a job of so many tasks with arguments (profile key, hardware, degree, file)."""

    file: Path
    profile_key: str
    hardware: str
    tps: tuple[int, ...]


def doubtful(run: RunDir, config: Config) -> Reprofile | None:
    """What is worth timing again and was not yet; noted as asked. Rows should have been ingested just before.

    Where a run may only advise, that it would be is noted as a decision, and None returned.
    """
    if not config.replan.reprofile or config.replan.mode == "off":
        return None
    with Reader(config.store) as reader:
        corrections = reader.records(Correction, where={"run_id": run.run_id})
        decisions = reader.decisions(run.run_id)
    tables = run.cost_tables()
    doubts = new_doubts(run, find_doubts(corrections, tables, decisions))
    if not doubts:
        return None
    file = write_doubts(run, doubts)
    if config.replan.mode == "advise":
        for doubt in doubts:
            detail = (
                f"{doubt.subject}: {doubt.factor:.2f}x of the prediction together with other sizes, profiling again"
            )
            spool_decision(run, config, _decision(run, decisions, doubt, ADVISED, detail, doubt.factor, 1.0))
        return None
    return Reprofile(file, tables[0].profile_key, tables[0].hardware, tuple(sorted({d.tp for d in doubts})))


def settle(run: RunDir, config: Config, work: Reprofile, say: Say) -> list[Decision]:
    """Judges what was timed, fits tables anew where the old ones are wrong, and tells of both.

    New tables are there for the next plan; a job that runs keeps those of its plan. Ingests before and after.
    """
    started_s = time.time()
    ingest(config.store)
    with Reader(config.store) as reader:
        measurements = reader.records(Measurement, where={"profile_key": work.profile_key})
        known = {t.table_id for t in reader.records(CostTable, where={"profile_key": work.profile_key})}
        decisions = reader.decisions(run.run_id)
    specs = {spec.module: spec for spec in bound_family(config).specs()}
    in_use = {table.module: table for table in run.cost_tables()}
    found, tables = [], list[CostTable]()
    for doubt in read_doubts(work.file):
        own = [m for m in measurements if m.module == doubt.module]
        try:
            judged = judge(doubt, in_use[doubt.module], own, specs[doubt.module])
        except CostError as error:
            found.append(_decision(run, decisions, doubt, FAILED, error.what, math.nan, math.nan))
            continue
        tables += [t for t in judged.tables if t.table_id not in known]
        verdict, seconds = DONE if judged.tables else STAY, (judged.measured_s, judged.before_s)
        found.append(_decision(run, decisions, doubt, verdict, judged.detail, *seconds))
    if tables:
        with Reader(config.store) as reader:
            before = reader.profile(work.profile_key)
        with SpoolWriter(config.store, run.run_id, "refit") as spool:
            for table in tables:
                spool.append(replace(table, fitted_at_s=time.time()))
            inputs, elapsed_s = before.inputs if before else "{}", time.time() - started_s
            spool.append(
                ProfileRecord(
                    work.profile_key, "model", run.run_id, inputs, len(measurements), 0, time.time(), elapsed_s
                )
            )
    for decision in found:
        say(f"{decision.kind}: {decision.detail}")
        spool_decision(run, config, decision)
    ingest(config.store)
    return found


def _decision(
    run: RunDir, decisions: list[Decision], doubt: Doubt, verdict: str, detail: str, measured: float, expected: float
) -> Decision:
    """At the step of the drift that it answers."""
    drift = max((d for d in decisions if d.kind == DRIFT_COST), key=lambda d: (d.attempt, d.step))
    return Decision(
        run.run_id, drift.attempt, drift.step, REPROFILE, doubt.subject, verdict, measured, expected, math.nan,
        math.nan, drift.num_steps_left, drift.plan_id, "", detail, time.time(),
    )  # fmt: skip
