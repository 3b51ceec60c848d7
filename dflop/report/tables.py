"""The tables of a run as plain text cells, so that terminal, Markdown and HTML show the same rows.

Headers say where a number comes from: `measured`, `simulated` (a whole step) or `predicted` (one span, cost model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflop import units
from dflop.records import ALL_TOKENS, LLM, Correction, ModulePlan, Plan
from dflop.records.speedup import NOT_COMPARED, Speedup
from dflop.report.comparison import ARRIVAL, BALANCED
from dflop.report.summary import RunSummary

SQL_LINE = 'dflop sql "select * from v_run_summary"'
MAX_ROWS = 50
"""Of lists that grow with the dataset; the rest is in the store."""
POLICY_NAMES = {ARRIVAL: "data-blind", BALANCED: "balanced"}


@dataclass(frozen=True, slots=True)
class Table:
    """Text cells with a title; columns whose header is in `text_columns` align left, numbers right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: frozenset[str] = frozenset()
    note: str = ""


def layout_text(plan: Plan) -> str:
    """`vision dp2 | llm pp2 dp1`: degrees of every module in rank order; tp, and pp of an encoder, only above 1.

    `inline pp2 dp4` where one chain holds all modules. `recompute` and `ZeRO-1` stand where they hold.
    """
    if plan.is_inline:
        return _place_text(plan.layout, plan.module(LLM))
    return " | ".join(_place_text(m.module, m) for m in sorted(plan.modules, key=lambda m: m.first_rank))


def stage_name(plan: Plan, module: str, stage: int) -> str:
    """`llm pp1`; `stage 1` of an inline plan, whose stages are the LLM's by name but may hold layers of any module."""
    return f"stage {stage}" if plan.is_inline else f"{module} pp{stage}"


def stage_layers(plan: Plan, module: str, stage: int) -> str:
    """`vision 21 + llm 3`: layers of every module on a stage."""
    parts = plan.modules if plan.is_inline else (plan.module(module),)
    return " + ".join(f"{m.module} {m.layers_per_stage[stage]}" for m in parts if m.layers_per_stage[stage])


def key_numbers(summary: RunSummary) -> tuple[tuple[str, str, str], ...]:
    """(label, value, remark) of what a person looks for first."""
    found = summary.comparison
    measured, predicted = (NOT_COMPARED, NOT_COMPARED) if found is None else (found.measured, found.predicted)
    plan = summary.plan
    over_uniform = units.ratio(plan.planned_speedup_over_uniform)
    # A loss can be NaN because it diverged; that must be seen, not shown as absent.
    loss = (
        f"{summary.first_loss:.2f} to {summary.last_loss:.2f}"
        if any(s.loss is not None for s in summary.steps)
        else "-"
    )
    return (
        _speedup("speedup, measured", measured, "data-blind over balanced step time"),
        _speedup("speedup, simulated", predicted, "of the same global batches"),
        ("speedup, planned", units.ratio(plan.planned_speedup), f"simulated; over a uniform plan {over_uniform}"),
        ("training step, measured", units.seconds(summary.step_s), f"median of {len(summary.steps)} steps"),
        ("loss", loss, "mean of the first and the last 3 steps"),
        ("LLM throughput, measured", _tokens_per_s(summary.llm_tokens_per_s), "median over steps"),
        ("idle, measured", units.percent(summary.idle_frac), "process time outside forward and backward"),
        ("wait for input, measured", units.seconds(summary.data_wait_s), "before a step, median"),
        ("samples quarantined", str(len(summary.quarantined)), "left out, with a reason each"),
    )


def _speedup(label: str, found: Speedup, remark: str) -> tuple[str, str, str]:
    value, _, interval = units.speedup(found.mean, found.low, found.high).partition(" ")
    return label, value, interval.strip("()") or remark


def policy_table(summary: RunSummary) -> Table:
    """Comparison steps, one row per policy; no rows without a comparison."""
    policies = summary.comparison.policies if summary.comparison else ()
    return Table(
        "Same global batches, both policies",
        ("policy", "steps", "step measured", "IQR", "fwd+bwd measured", "fwd+bwd simulated", "idle measured"),
        tuple(
            (
                POLICY_NAMES[p.policy],
                str(p.num_steps),
                units.seconds(p.step_s),
                units.seconds(p.step_q3_s - p.step_q1_s),
                units.seconds(p.pipeline_s),
                units.seconds(p.predicted_step_s),
                units.percent(p.idle_frac),
            )
            for p in policies
        ),
        frozenset({"policy"}),
        "Medians. Data-blind: arrival order, equal counts. Simulated: without reduction and optimizer.",
    )


def stage_table(summary: RunSummary) -> Table:
    """Training steps, one row per pipeline stage."""
    return Table(
        "Stages in training",
        (
            "stage",
            "layers",
            "processes",
            "busy",
            "reduce + optimizer",
            "idle",
            "prediction error",
            "predicted / measured",
        ),
        tuple(
            (
                stage_name(summary.plan, s.module, s.stage),
                stage_layers(summary.plan, s.module, s.stage),
                str(s.num_ranks),
                units.percent(s.busy_frac),
                units.percent(s.reduce_frac),
                units.percent(s.idle_frac),
                units.percent(s.median_error_frac),
                units.ratio(s.predicted_to_measured),
            )
            for s in summary.stages
        ),
        frozenset({"stage", "layers"}),
        f"Measured. Idle: all but busy{_busy_remark(summary)}. Error: median over microbatches.",
    )


def plan_table(plans: Sequence[Plan]) -> Table:
    """Candidates in their order, the plan that ran first."""
    return Table(
        "Plan and runners-up",
        (
            "rank",
            "layout",
            "micro-batches",
            "step simulated",
            "data-blind simulated",
            "uniform simulated",
            "processes",
            "reason",
        ),
        tuple(
            (
                str(p.candidate_rank),
                layout_text(p),
                str(p.num_microbatches),
                units.seconds(p.predicted_step_s),
                units.seconds(p.baseline_step_s),
                units.seconds(p.uniform_step_s),
                str(p.num_processes),
                p.reason,
            )
            for p in plans
        ),
        frozenset({"layout", "reason"}),
        "Steps with gradient synchronisation and optimizer. Data-blind: arrival order, equal counts, on this layout. "
        "Uniform: the best data-blind plan with one layout for the whole model.",
    )


def quarantine_table(summary: RunSummary) -> Table:
    """Samples left out, at most `MAX_ROWS`."""
    more = len(summary.quarantined) - MAX_ROWS
    return Table(
        "Quarantined samples",
        ("sample", "found by", "file", "reason"),
        tuple((q.sample_id, q.phase, q.path, q.reason) for q in summary.quarantined[:MAX_ROWS]),
        frozenset({"sample", "found by", "file", "reason"}),
        f'{more} more: dflop sql "select * from v_quarantine"' if more > 0 else "",
    )


def correction_table(summary: RunSummary) -> Table:
    """Corrections at the end of the run: per module its level, then the sizes that plans are made otherwise for."""
    modules = {c.module: [d for d in summary.corrections if d.module == c.module] for c in summary.corrections}
    rows: list[tuple[str, ...]] = []
    for module, buckets in modules.items():
        in_force = [c for c in buckets if c.is_in_force and len(buckets) > 1]
        first = buckets[0]
        rows.append(
            (
                module,
                "typical mix",
                str(first.effective_step + 1),
                units.ratio(first.level),
                "",
                f"{len(in_force)} of {len(buckets)} sizes" if len(buckets) > 1 else "",
                units.percent(first.residual_frac),
                units.count(max(c.num_observations for c in buckets)),
            )
        )
        rows += [
            (module, _sizes(c), "", units.ratio(c.factor), units.ratio(c.sd_frac), "yes", "", "") for c in in_force
        ]
    return Table(
        "Corrections learnt",
        ("module", "tokens of an item", "from step", "factor", "+-", "in force", "error before", "observations"),
        tuple(rows),
        frozenset({"module", "tokens of an item"}),
        f"Last per module, of {summary.num_corrections}. Factor: measured over predicted compute seconds. "
        "Sizes that are not in force have the factor of the typical mix."
        if summary.corrections
        else "",
    )


def reproducibility(summary: RunSummary) -> tuple[tuple[str, str], ...]:
    """(name, value) of what is needed to run the same thing again."""
    run, plan = summary.run, summary.plan
    cores = "a device each" if summary.num_cores is None else f"{summary.num_cores} at a time"
    return (
        ("run", run.run_id),
        ("state", run.state),
        ("config key", run.config_key),
        ("plan", f"{plan.plan_id}: {layout_text(plan)}"),
        ("global batch", f"{plan.global_batch_size} samples in {plan.num_microbatches} microbatches"),
        ("store snapshot", str(plan.snapshot_seq)),
        ("hardware", run.hardware),
        ("processes", f"{plan.num_processes}, {cores}"),
        ("software", run.software),
        ("code revision", run.code_rev),
        ("run directory", run.run_dir),
    )


def _place_text(name: str, module: ModulePlan) -> str:
    p = module.parallel
    degrees = [f"tp{p.tp}"] * (p.tp > 1) + [f"pp{p.pp}"] * (p.pp > 1 or module.module == LLM) + [f"dp{p.dp}"]
    ways = ["recompute"] * module.recompute + ["ZeRO-1"] * module.shard_optimizer
    return " ".join([name, *degrees, *ways])


def _sizes(bucket: Correction) -> str:
    if bucket.max_tokens >= ALL_TOKENS:
        return f"from {bucket.min_tokens}"
    return f"{bucket.min_tokens} to {bucket.max_tokens - 1}"


def _busy_remark(summary: RunSummary) -> str:
    shares = summary.num_cores is not None and summary.num_cores < summary.plan.num_processes
    return "; busy includes waiting for a core" if shares else ""


def _tokens_per_s(value: float) -> str:
    return "-" if math.isnan(value) else f"{units.count(round(value))} tokens/s"
