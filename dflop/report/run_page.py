"""One HTML file that says what a run did: to open from disk, copy or mail. It loads nothing from anywhere."""

from __future__ import annotations

import math
import statistics

from dflop import units
from dflop.report import run_plots, run_tables
from dflop.report.history_table import history_table
from dflop.report.html_page import Drawing, Page, Pairs, Section, drawings, render_page
from dflop.report.stage_stats import error_table, timed_spans
from dflop.report.summary import RunSummary
from dflop.report.tables import layout_text, plan_table, stage_layers, stages_of_plan
from dflop.report.timeline import batch_gantt
from dflop.report.worth import worth_table

MEASURED, SIMULATED, PREDICTED = "measured", "simulated", "predicted"


def render_report(summary: RunSummary) -> str:
    """The whole document, a pure function of the summary."""
    return render_page(run_page(summary))


def run_page(summary: RunSummary) -> Page:
    """Everything that is known of a run."""
    run = summary.run
    return Page(
        title=f"dflop run {run.run_id}",
        subtitle=f"{run.state} · {layout_text(summary.plan)} · {run.hardware}",
        kinds=(),
        verdict=summary.verdict,
        numbers=run_tables.key_numbers(summary),
        sections=(
            _ran(summary),
            _plan(summary),
            _comparison(summary),
            _timeline(summary),
            Section(
                "idle",
                "Idle time and balance per stage",
                (MEASURED,),
                tables=(run_tables.idle_table(summary), run_tables.stage_table(summary)),
            ),
            _prediction(summary),
            _corrections(summary),
            Section("history", "History", tables=(history_table(summary.details.history),)),
            _memory(summary),
            Section("quarantine", "Quarantined samples", tables=(run_tables.quarantine_table(summary.quarantined),)),
            Section("worth", "What it is worth", tables=(worth_table(summary),)),
            _reproduce(summary),
        ),
    )


def median_mfu(summary: RunSummary) -> float:
    """Model FLOPs utilisation; NaN where the peak of the devices is not known."""
    step_s = {s.step: s.step_s for s in summary.steps}
    found = [
        f.model_flops / (f.peak_flops_per_s * step_s[f.step])
        for f in summary.details.flops
        if step_s.get(f.step, 0.0) > 0 and f.peak_flops_per_s > 0
    ]
    return statistics.median(found) if found else math.nan


def run_facts(summary: RunSummary) -> Pairs:
    """(name, value) of what ran."""
    run, plan, details = summary.run, summary.plan, summary.details
    cores = "a device each" if summary.num_cores is None else f"{summary.num_cores} at a time"
    planned = "" if details.num_steps_planned is None else f" of {details.num_steps_planned}"
    facts = [
        ("run", f"{run.name}, {run.state}"),
        *details.facts,
        ("hardware", run.hardware),
        ("processes", f"{plan.num_processes}, {cores}: {layout_text(plan)}"),
        ("optimizer steps", f"{len(summary.steps)}{planned}, of {plan.global_batch_size} samples each"),
    ]
    if not math.isnan(mfu := median_mfu(summary)):
        facts.append(("model FLOPs utilisation", f"{units.percent(mfu)}, measured, median over steps"))
    return tuple(facts)


def _ran(summary: RunSummary) -> Section:
    return Section(
        "ran",
        "What ran",
        facts=run_facts(summary),
        drawings=drawings(
            (run_plots.loss_curve(summary.steps), "Loss of every training step.", (MEASURED,)),
            (
                run_plots.throughput_curve(summary.steps, summary.details.plan_steps),
                "LLM tokens per second of every training step.",
                (MEASURED,),
            ),
        ),
    )


def _plan(summary: RunSummary) -> Section:
    plan, sources = summary.plan, summary.details.cost_sources
    layers = "; ".join(f"{name}: {stage_layers(plan, p.module, stage)}" for p, stage, name in stages_of_plan(plan))
    facts = [
        ("layers", layers),
        ("microbatches", f"{plan.num_microbatches} for a global batch of {plan.global_batch_size} samples"),
        ("why", plan.reason or "not recorded"),
    ]
    if sources:
        facts.append(("costs", ", ".join(f"{module} {source}" for module, source in sources)))
    kinds = (SIMULATED, *["analytic"] * any(source == "analytic" for _, source in sources))
    return Section("plan", "The plan and why", kinds, facts=tuple(facts), tables=(plan_table(summary.candidates),))


def _comparison(summary: RunSummary) -> Section:
    bars = run_plots.step_time_bars(summary.comparison) if summary.comparison else None
    caption = "Median step time on the same global batches; whiskers: quartiles."
    return Section(
        "comparison",
        "Same global batches, both policies",
        drawings=drawings((bars, caption, (MEASURED, SIMULATED))),
        tables=(run_tables.policy_table(summary),),
    )


def _timeline(summary: RunSummary) -> Section:
    title, kinds = "One global batch, data-blind above balanced", (MEASURED, SIMULATED)
    pair = summary.comparison.typical_pair() if summary.comparison else None
    if pair is None:
        return Section("timeline", title, kinds, text="No global batch was trained under both policies.")
    svg = batch_gantt(pair, summary.plan, summary.details.compare_plans, summary.num_cores)
    steps = " and ".join(str(step.step) for step in pair.typical())
    return Section(
        "timeline",
        title,
        kinds,
        drawings=(Drawing(svg, "Numbers are microbatches; point at a bar to read what it did.", is_wide=True),),
        notes=(
            "The batch of median speed-up, not the best one.",
            "Simulated: the simulator on the recorded predictions, messages taking no time.",
            f"To zoom, and for every process: dflop trace {summary.run.run_id} --job compare, steps {steps}, in "
            "ui.perfetto.dev.",
        ),
    )


def _prediction(summary: RunSummary) -> Section:
    spans = timed_spans(summary.steps)
    caption = f"Every microbatch of training on every stage, at most {run_plots.MAX_MARKERS} of them."
    return Section(
        "prediction",
        "Prediction and measurement",
        (PREDICTED, MEASURED),
        drawings=drawings((run_plots.prediction_scatter(spans), caption, ())),
        tables=(error_table(spans),),
    )


def _corrections(summary: RunSummary) -> Section:
    tables = run_tables.correction_table(summary), run_tables.slow_rank_table(summary.details.rank_factors)
    return Section("corrections", "Corrections learnt", (MEASURED,), tables=tables)


def _memory(summary: RunSummary) -> Section:
    peaks = summary.details.peaks
    rows = run_tables.memory_rows(summary.plan, peaks)
    kinds = (PREDICTED, *[MEASURED] * any(measured is not None for _, _, measured in rows)) if rows else ()
    table = run_tables.memory_table(rows, summary.memory_limit_bytes, peaks)
    return Section("memory", "Memory per stage", kinds, tables=(table,))


def _reproduce(summary: RunSummary) -> Section:
    run, plan, details = summary.run, summary.plan, summary.details
    facts = [
        ("run", run.run_id),
        ("config key", run.config_key),
        ("plan", f"{plan.plan_id}: {layout_text(plan)}"),
        ("store snapshot", str(plan.snapshot_seq)),
        ("software", run.software),
        ("code revision", run.code_rev),
        ("run directory", run.run_dir),
    ]
    for seen in sorted(details.inputs, key=lambda i: i.observed_at_s):
        read = f"snapshot {seen.snapshot_seq}, revision {seen.snapshot_revision}"
        profiles = f"data profile {seen.data_profile_key}, model profile {seen.model_profile_key}"
        facts.append((f"read by {seen.job}", f"{read}; {profiles}; cost tables {', '.join(seen.table_ids) or 'none'}"))
    facts.append(("all numbers", run_tables.SQL_LINE))
    return Section(
        "reproduce",
        "To reproduce",
        facts=tuple(facts),
        listing=("Configuration, every default filled in", details.config_text),
    )
