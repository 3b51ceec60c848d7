"""One HTML file that says what a run did: to open from disk, copy or mail. It loads nothing from anywhere."""

from __future__ import annotations

from dflop.report import run_plots, run_tables
from dflop.report.history_table import history_table
from dflop.report.html_page import Drawing, Page, Pairs, Section, drawings, render_page
from dflop.report.model_check import check_section
from dflop.report.stage_stats import error_table, timed_spans
from dflop.report.summary import RunSummary
from dflop.report.tables import layout_text, plan_table, stage_layers, stages_of_plan
from dflop.report.terms_table import terms_table
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
            Section(
                "corrections",
                "Cost corrections",
                (MEASURED,),
                tables=(run_tables.correction_table(summary), run_tables.slow_rank_table(summary.rank_factors)),
            ),
            Section("history", "History", tables=(history_table(summary.history),)),
            _memory(summary),
            check_section(*summary.model_check, run.software),
            Section("quarantine", "Skipped samples", tables=(run_tables.quarantine_table(summary.quarantined),)),
            Section("worth", "Savings", tables=(worth_table(summary),)),
            _reproduce(summary),
        ),
    )


def run_facts(summary: RunSummary) -> Pairs:
    """(name, value) of what ran."""
    run, plan = summary.run, summary.plan
    cores = "one device per process" if summary.num_cores is None else f"{summary.num_cores} at a time"
    planned = "" if summary.num_steps_planned is None else f" of {summary.num_steps_planned}"
    return (
        ("run", f"{run.name}, {run.state}"),
        *summary.facts,
        ("hardware", run.hardware),
        ("processes", f"{plan.num_processes}, {cores}: {layout_text(plan)}"),
        ("optimizer steps", f"{len(summary.steps)}{planned}, of {plan.global_batch_size} samples each"),
    )


def _ran(summary: RunSummary) -> Section:
    loss, speed = (
        run_plots.loss_curve(summary.steps, summary.validation),
        run_plots.throughput_curve(summary.steps, summary.plan_steps),
    )
    drawn = drawings(
        (loss, "Loss of every training step.", (MEASURED,)),
        (speed, "LLM tokens per second of every training step.", (MEASURED,)),
    )
    return Section("ran", "What ran", facts=run_facts(summary), drawings=drawn)


def _plan(summary: RunSummary) -> Section:
    plan, sources = summary.plan, summary.cost_sources
    layers = "; ".join(f"{name}: {stage_layers(plan, p.module, stage)}" for p, stage, name in stages_of_plan(plan))
    facts = [
        ("layers", layers),
        ("microbatches", f"{plan.num_microbatches} for a global batch of {plan.global_batch_size} samples"),
        ("why", plan.reason or "not recorded"),
    ]
    if sources:
        facts.append(("costs", ", ".join(f"{module} {source}" for module, source in sources)))
    kinds = (SIMULATED, *["analytic"] * any(source == "analytic" for _, source in sources))
    tables = plan_table(summary.candidates or (plan,)), terms_table(summary.terms)
    return Section("plan", "The plan and why", kinds, facts=tuple(facts), tables=tables)


def _comparison(summary: RunSummary) -> Section:
    bars = run_plots.step_time_bars(summary.comparison) if summary.comparison else None
    drawn = (bars, "Step time on the same global batches; whiskers: quartiles of steps.", (MEASURED, SIMULATED))
    table = run_tables.policy_table(summary)
    return Section("comparison", "Same global batches, every policy", drawings=drawings(drawn), tables=(table,))


def _timeline(summary: RunSummary) -> Section:
    title, kinds = "One global batch, arrival order above balanced", (MEASURED, SIMULATED)
    pair = summary.comparison.typical_pair() if summary.comparison else None
    if pair is None:
        return Section("timeline", title, kinds, text="No global batch was trained under both policies.")
    svg = batch_gantt(pair, summary.plan, summary.compare_plans, summary.num_cores)
    steps = " and ".join(str(step.step) for step in pair.typical())
    return Section(
        "timeline",
        title,
        kinds,
        drawings=(Drawing(svg, "Numbers are microbatches; hover over a bar for details.", is_wide=True),),
        notes=(
            "The batch of median speedup, not the best one.",
            "Simulated: the simulator on the recorded predictions, without communication time.",
            f"To zoom, and for every process: dflop trace {summary.run.run_id} --job compare, steps {steps}, in "
            "ui.perfetto.dev.",
        ),
    )


def _prediction(summary: RunSummary) -> Section:
    spans = timed_spans(summary.steps)
    caption = f"Every microbatch of training on every stage, at most {run_plots.MAX_MARKERS} of them."
    drawn, kinds = drawings((run_plots.prediction_scatter(spans), caption, ())), (PREDICTED, MEASURED)
    return Section("prediction", "Prediction and measurement", kinds, drawings=drawn, tables=(error_table(spans),))


def _memory(summary: RunSummary) -> Section:
    table = run_tables.memory_table(summary.plan, summary.cluster.memory_per_process_bytes, summary.peaks)
    kinds = (PREDICTED, *[MEASURED] * bool(summary.peaks)) if table.rows else ()
    return Section("memory", "Memory per stage", kinds, tables=(table,))


def _reproduce(summary: RunSummary) -> Section:
    run, plan = summary.run, summary.plan
    facts = [
        ("run", run.run_id),
        ("config key", run.config_key),
        ("plan", f"{plan.plan_id}: {layout_text(plan)}"),
        ("store snapshot", str(plan.snapshot_seq)),
        ("software", run.software),
        ("code revision", run.code_rev),
        ("run directory", run.run_dir),
    ]
    for seen in sorted(summary.inputs, key=lambda i: i.observed_at_s):
        read = f"snapshot {seen.snapshot_seq}, revision {seen.snapshot_revision}"
        profiles = f"data profile {seen.data_profile_key}, model profile {seen.model_profile_key}"
        facts.append((f"read by {seen.job}", f"{read}; {profiles}; cost tables {', '.join(seen.table_ids) or 'none'}"))
    facts.append(("all numbers", run_tables.SQL_LINE))
    listing = "Configuration with all defaults", summary.config_text
    return Section("reproduce", "To reproduce", facts=tuple(facts), listing=listing)
