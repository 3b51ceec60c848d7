"""Timing again, beside the training, what predictions are doubtful about: when, and what becomes of it.

The flow asks `doubtful` after each ingest, submits a job per tensor-parallel degree
(`dflop.jobs.model_profile:again`), and hands the file of doubts to `settle`.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

from dflop.config import Config
from dflop.correct.drift_detector import DRIFT_COST
from dflop.errors import CostError
from dflop.learn.remeasure import Doubt, find_doubts, judge, new_doubts, read_doubts, write_doubts
from dflop.records import Correction, CostTable, Decision, Measurement
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.steps.planning import bound_family
from dflop.steps.profiling import note_profile
from dflop.steps.replanning import ADVISED, DONE, FAILED, REPROFILE, STAY, spool_decision
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import spool_rows


def doubtful(run: RunDir, config: Config) -> Path | None:
    """A file of what is worth timing again and was not yet; noted as asked. Rows should have been ingested just before.

    Where a run may only advise, that it would be is noted as a decision, and None returned.
    """
    if not config.replan.reprofile or config.replan.mode == "off":
        return None
    with Reader(config.store) as reader:
        corrections = reader.records(Correction, where={"run_id": run.run_id})
        decisions = reader.decisions(run.run_id)
    doubts = new_doubts(run, find_doubts(corrections, run.cost_tables(), decisions))
    file = write_doubts(run, doubts) if doubts else None
    if config.replan.mode != "advise":
        return file
    for doubt in doubts:
        detail = f"{doubt.subject}: {doubt.factor:.2f}x of the prediction together with other sizes, profiling again"
        spool_decision(run, config, _decision(decisions, doubt, ADVISED, detail, doubt.factor, 1.0))
    return None


def settle(run: RunDir, config: Config, file: Path, say: Say) -> list[Decision]:
    """Judges what was timed of a file, fits tables anew where the old ones are wrong, and tells of both.

    New tables are there for the next plan; a job that runs keeps those of its plan. Ingests before and after.
    """
    started_s, in_use = time.time(), {table.module: table for table in run.cost_tables()}
    key = run.cost_tables()[0].profile_key
    ingest(config.store)
    with Reader(config.store) as reader:
        measurements = reader.records(Measurement, where={"profile_key": key})
        known = {t.table_id for t in reader.records(CostTable, where={"profile_key": key})}
        decisions, before = reader.decisions(run.run_id), reader.profile(key)
    specs = {spec.module: spec for spec in bound_family(config).specs()}
    found, tables = [], list[CostTable]()
    for doubt in read_doubts(file):
        own = [m for m in measurements if m.module == doubt.module]
        try:
            judged = judge(doubt, in_use[doubt.module], own, specs[doubt.module])
        except CostError as error:
            found.append(_decision(decisions, doubt, FAILED, error.what, math.nan, math.nan))
            continue
        tables += [t for t in judged.tables if t.table_id not in known]
        verdict, seconds = DONE if judged.tables else STAY, (judged.measured_s, judged.before_s)
        found.append(_decision(decisions, doubt, verdict, judged.detail, *seconds))
    if tables:
        spool_rows(config.store, run.run_id, "refit", (replace(table, fitted_at_s=time.time()) for table in tables))
        counts, inputs = [{"num_measurements": len(measurements)}], json.loads(before.inputs if before else "{}")
        note_profile(run, key, "model", counts, time.time() - started_s, inputs)
    for decision in found:
        say(f"{decision.kind}: {decision.detail}")
        spool_decision(run, config, decision)
    ingest(config.store)
    return found


def _decision(
    decisions: list[Decision], doubt: Doubt, verdict: str, detail: str, measured: float, expected: float
) -> Decision:
    """At the step of the drift that it answers, which changes no plan either."""
    drift = max((d for d in decisions if d.kind == DRIFT_COST), key=lambda d: (d.attempt, d.step))
    return replace(
        drift, kind=REPROFILE, subject=doubt.subject, verdict=verdict, measured=measured, expected=expected,
        detail=detail, observed_at_s=time.time(),
    )  # fmt: skip
