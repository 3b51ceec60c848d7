"""Everything the store knows about one run, gathered into the values the report room takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflop.errors import ConfigError, StoreError, did_you_mean
from dflop.records import Correction, Plan, QuarantinedSample, RunRecord, StepObservation, StepPlan
from dflop.report.history_table import COLUMNS, HistoryEntry
from dflop.report.summary import RunSummary, summarise
from dflop.run.batches import COMPARE
from dflop.run.directory import RunDir
from dflop.store import console
from dflop.store.reader import Reader
from dflop.views.load_details import load_details


def load_summary(run: RunDir) -> RunSummary:
    """Summary of a run from the newest snapshot of its store.

    Raises:
        ConfigError: the run has no plan yet.
        StoreError: the store does not know the run.
    """
    config = run.config()
    if not run.has_plan():
        raise ConfigError(
            f"run `{run.run_id}` has no plan yet, there is nothing to sum up",
            where=str(run.path),
            hint="dflop runs show says how it stands",
        )
    compare_id = f"{run.run_id}/{COMPARE}"
    with Reader(config.store) as reader:
        states = sorted(reader.records(RunRecord, where={"run_id": run.run_id}), key=lambda r: r.observed_at_s)
        if not states:
            raise StoreError(f"run `{run.run_id}` is not in the store", where=str(config.store))
        chosen = run.plan()
        plans = reader.records(Plan, where={"run_id": run.run_id})
        shapes_key = run.profile_key()
        quarantined = {
            (q.sample_index, q.phase): q
            for q in (
                *reader.records(QuarantinedSample, where={"profile_key": shapes_key, "phase": "profile"}),
                *reader.records(QuarantinedSample, where={"run_id": [run.run_id, compare_id], "phase": "train"}),
            )
        }
        return summarise(
            run=states[-1],
            cluster=config.cluster.spec(),
            plan=replace(chosen, run_id=run.run_id),
            candidates=[p for p in plans if p.snapshot_seq == chosen.snapshot_seq],  # of the search that found it
            train=reader.records(StepObservation, where={"run_id": run.run_id}),
            compare=reader.records(StepObservation, where={"run_id": compare_id}),
            compare_plans=reader.records(StepPlan, where={"run_id": compare_id}),
            speedups=reader.speedups(run.run_id),
            quarantined=list(quarantined.values()),
            corrections=reader.records(Correction, where={"run_id": run.run_id}),
        )


def load_history(store: Path, run_id: str) -> list[HistoryEntry]:
    """Everything that was noticed and decided in a run, in order, from the newest snapshot.

    Raises:
        StoreError: the store does not know the run, or was never published.
    """
    sql = f"select {', '.join(COLUMNS)} from v_history where run_id = $run_id order by number"
    _, rows = console.query(store, sql, {"run_id": run_id})
    if not rows:
        newest = console.query(store, "select run_id from v_run order by started_at desc limit 20")[1]
        raise StoreError(
            f"run `{run_id}` is not in the store",
            where=str(store),
            hint=did_you_mean(run_id, [row[0] for row in newest]),
        )
    return [HistoryEntry(*row) for row in rows]


def write_report(run: RunDir) -> RunSummary:
    """Write report.html into the run directory and return the summary it shows."""
    from dflop.report.html import write_report as write_html  # with matplotlib, which a driver needs at the end

    summary = load_summary(run)
    history = load_history(run.config().store, run.run_id)
    write_html(run.report_file, summary, load_details(run, summary, history))
    return summary
