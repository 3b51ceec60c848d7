"""One HTML file that says what a run did: to open from disk, copy or mail. It loads nothing from anywhere."""

from __future__ import annotations

from pathlib import Path

from dflop import files
from dflop.report import accuracy, balance, plots, report_sections, run_plots, tables
from dflop.report.calculator import SCRIPT as CALCULATOR
from dflop.report.gantt import Gantt, draw_gantt
from dflop.report.history_table import history_table
from dflop.report.html_page import render_page
from dflop.report.run_details import RunDetails
from dflop.report.summary import RunSummary
from dflop.report.timeline import batch_timeline

SCRIPTS = ("timeline.js", CALCULATOR, "print.js")
CONTENTS = (
    ("ran", "what ran"),
    ("plan", "plan"),
    ("comparison", "comparison"),
    ("timeline", "timeline"),
    ("idle", "idle time"),
    ("balance", "balance"),
    ("prediction", "prediction"),
    ("corrections", "corrections"),
    ("history", "history"),
    ("memory", "memory"),
    ("quarantine", "quarantine"),
    ("worth", "worth"),
    ("reproduce", "reproduce"),
)
"""(id, text) of the page's sections."""
NOTHING = RunDetails()


def write_report(path: Path, summary: RunSummary, details: RunDetails = NOTHING) -> None:
    """Writes the report; a reader sees the old file or the new one, never a part.

    Raises:
        OSError: The folder is missing or not writable; nothing is left behind.
    """
    files.replace(path, render_report(summary, details))


def render_report(summary: RunSummary, details: RunDetails = NOTHING) -> str:
    """The whole document, a pure function of summary and details."""
    plan, comparison = summary.plan, summary.comparison
    pairs = comparison.pairs if comparison else ()
    pair = comparison.typical_pair() if comparison else None
    spans = accuracy.timed_spans(summary.steps)
    shares = balance.stage_shares(pairs, plan)
    memory = report_sections.memory_rows(plan, details.peaks)
    limit_bytes = details.memory_limit_bytes
    return render_page(
        "report.html.jinja",
        SCRIPTS,
        contents=CONTENTS,
        run=summary.run,
        layout=tables.layout_text(plan),
        verdict=summary.verdict,
        key_numbers=tables.key_numbers(summary),
        ran=report_sections.run_facts(summary, details),
        loss=plots.loss_curve(summary.steps) if summary.steps else None,
        throughput=run_plots.throughput_curve(summary.steps, details.plan_steps),
        plan_facts=report_sections.plan_facts(summary, details),
        plan_kinds=("simulated", *["analytic"] * any(source == "analytic" for _, source in details.cost_sources)),
        plan=tables.plan_table(summary.candidates),
        policies=tables.policy_table(summary),
        bars=plots.step_time_bars(comparison) if comparison else None,
        gantt=_gantt(summary, details) if pair else None,
        idle=balance.shares_table(shares),
        idle_bars=run_plots.idle_bars(shares),
        stages=tables.stage_table(summary),
        balance=balance.evenness_table(pairs, plan),
        balance_bars=run_plots.balance_bars(balance.evenness(pair, plan)) if pair else None,
        scatter=run_plots.prediction_scatter(spans),
        errors=accuracy.error_table(accuracy.errors_by_size(spans)),
        corrections=tables.correction_table(summary),
        correction_curves=run_plots.correction_curves(details.corrections, details.plan_steps),
        slow_ranks=report_sections.slow_rank_table(details.rank_factors),
        history=history_table(details.history),
        memory=report_sections.memory_table(memory, limit_bytes, {peak.kind for peak in details.peaks}),
        memory_kinds=_memory_kinds(memory),
        memory_bars=run_plots.memory_bars(memory, limit_bytes) if limit_bytes else None,
        quarantine=tables.quarantine_table(summary),
        calculator=report_sections.run_calculator(summary, details),
        reproducibility=report_sections.reproduction(summary, details),
        config_text=details.config_text,
        sql_line=tables.SQL_LINE,
    )


def _gantt(summary: RunSummary, details: RunDetails) -> Gantt | None:
    pair = summary.comparison.typical_pair() if summary.comparison else None
    if pair is None:
        return None
    found = batch_timeline(pair, summary.plan, details.compare_plans, details.shapes, summary.num_cores)
    return draw_gantt(found)


def _memory_kinds(rows: tuple[report_sections.MemoryRow, ...]) -> tuple[str, ...]:
    if not rows:
        return ()
    is_measured = any(measured is not None for _, _, measured in rows)
    return ("predicted", "measured") if is_measured else ("predicted",)
