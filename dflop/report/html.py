"""One HTML file that says what a run did: to open from disk, copy or mail. It loads nothing from anywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jinja2

from dflop.report import plots, tables
from dflop.report.history import HistoryEntry, history_table
from dflop.report.summary import RunSummary


def write_report(path: Path, summary: RunSummary, history: Sequence[HistoryEntry] = ()) -> None:
    """Writes the report; a reader sees the old file or the new one, never a part.

    Raises:
        OSError: The folder is missing or not writable; nothing is left behind.
    """
    text = render_report(summary, history)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        tmp.write_text(text, encoding="utf-8")
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def render_report(summary: RunSummary, history: Sequence[HistoryEntry] = ()) -> str:
    """The whole document, a pure function of summary and history."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dflop.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    comparison = summary.comparison
    pair = comparison.typical_pair() if comparison else None
    return environment.get_template("report.html.j2").render(
        run=summary.run,
        layout=tables.layout_text(summary.plan),
        verdict=summary.verdict,
        key_numbers=tables.key_numbers(summary),
        plan=tables.plan_table(summary.candidates),
        policies=tables.policy_table(summary),
        stages=tables.stage_table(summary),
        quarantine=tables.quarantine_table(summary),
        corrections=tables.correction_table(summary),
        history=history_table(history),
        reproducibility=tables.reproducibility(summary),
        loss=plots.loss_curve(summary.steps) if summary.steps else None,
        bars=plots.step_time_bars(comparison) if comparison else None,
        timeline=plots.timeline(pair, summary.plan) if pair else None,
        sql_line=tables.SQL_LINE,
    )
