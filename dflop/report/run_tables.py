"""What a summary says in cells: key numbers, policies, stages, corrections, memory, slow ranks, quarantine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflop import units
from dflop.records import ALL_TOKENS, Correction, Plan, QuarantinedSample, RankFactor, RankMemory
from dflop.records.speedup import NOT_COMPARED, Speedup
from dflop.report.comparison import ARRIVAL, BALANCED
from dflop.report.stage_stats import StageStats, errors_of, stage_stats, timed_spans
from dflop.report.summary import RunSummary
from dflop.report.tables import POLICY_NAMES, Table, make_table, stages_of_plan

SQL_LINE = 'dflop sql "select * from v_run_summary"'
MAX_ROWS = 50
"""Most rows of lists that grow with the dataset; the rest is in the store."""
NOT_BLIND = "This run has no comparison with steps in arrival order."


def key_numbers(summary: RunSummary) -> tuple[tuple[str, str, str], ...]:
    """(label, value, remark) of what a person looks for first, on the terminal, in Prefect and on the page."""
    found, plan, ends = summary.comparison, summary.plan, summary.ends_of_loss
    measured, predicted = (NOT_COMPARED, NOT_COMPARED) if found is None else (found.measured, found.predicted)
    tokens_per_s = summary.median(lambda s: s.llm_tokens_per_s)
    planned = f"simulated; over a uniform plan {units.ratio(plan.planned_speedup_over_uniform)}"
    numbers = [
        _speedup("speedup, measured", measured, "arrival order / balanced step time"),
        _speedup("speedup, simulated", predicted, "of the same global batches"),
        ("speedup, planned", units.ratio(plan.planned_speedup), planned),
        ("training step, measured", units.seconds(summary.step_s), f"median of {len(summary.steps)} steps, wall time"),
        (
            "training step, predicted / measured",
            units.ratio(summary.predicted_to_measured),
            "wall time, median; predictions are without reduction and optimizer",
        ),
        # A loss can be NaN because it diverged; that must be seen, not shown as absent.
        ("loss", f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "-", "mean of the first and the last 3 steps"),
        (
            "LLM throughput, measured",
            "-" if math.isnan(tokens_per_s) else f"{units.count(round(tokens_per_s))} tokens/s",
            "median over steps"
            if math.isnan(tokens_per_s)
            else f"median over steps; {units.count(round(tokens_per_s / plan.num_processes))} per process",
        ),
        ("idle, measured", units.percent(summary.idle_frac), "process time outside forward and backward"),
        ("wait for input, measured", units.seconds(summary.median(lambda s: s.data_wait_s)), "before a step, median"),
        ("samples skipped", str(len(summary.quarantined)), "each with a reason"),
    ]
    if seen := summary.validation:
        best, (last, loss) = min(seen, key=lambda step: seen[step]), max(seen.items())
        numbers.append(("validation loss", f"{loss:.4f}", f"after step {last}; lowest {seen[best]:.4f} after {best}"))
    if seen := summary.router_loss:
        (first, began), (last, loss) = min(seen.items()), max(seen.items())
        what = f"after step {last}; {began:.4f} after {first}; 1: experts are used evenly"
        numbers.append(("load balancing loss", f"{loss:.4f}", what))
    if not math.isnan(wall := summary.wall_to_compute):
        numbers.append(("processor time / wall time", units.percent(1 / wall), "of forward and backward in training"))
    if not math.isnan(mfu := summary.mfu):
        numbers.append(("model FLOPs utilisation", units.percent(mfu), "measured, median over steps"))
    return tuple(numbers)


def policy_table(summary: RunSummary) -> Table:
    """Comparison steps, one row per policy; no rows without a comparison."""
    found = summary.comparison
    speedups = {policy: measured for policy, (measured, _) in (found.speedups if found else {}).items()}

    def measured(policy: str) -> Speedup:
        return speedups.get(policy, NOT_COMPARED)

    return make_table(
        "Same global batches, every policy",
        found.policies if found else (),
        {
            "policy": lambda p: POLICY_NAMES[p.policy],
            "steps": lambda p: str(p.num_steps),
            "step measured": lambda p: units.seconds(p.step_s),
            "speedup": lambda p: units.speedup(measured(p.policy).mean, math.nan, math.nan).strip("-"),
            "95 %": lambda p: units.interval(measured(p.policy).low, measured(p.policy).high),
            "fwd+bwd measured": lambda p: units.seconds(p.pipeline_s),
            "fwd+bwd simulated": lambda p: units.seconds(p.predicted_step_s),
            "idle measured": lambda p: units.percent(p.idle_frac),
        },
        text={"policy"},
        note="Geometric means over the global batches that all policies ran; speedup: of balanced over the row's "
        "policy, mean ratio. Arrival order: equal counts per microbatch. Simulated: without "
        "reduction and optimizer.",
        empty=NOT_BLIND,
    )


def stage_table(summary: RunSummary) -> Table:
    """Training steps, one row per pipeline stage."""
    return make_table(
        "Stages in training",
        summary.stages,
        {
            "stage": lambda s: s.stage,
            "layers": lambda s: s.layers,
            "processes": lambda s: str(s.num_ranks),
            "busy": lambda s: units.percent(s.busy_frac),
            "reduce + optimizer": lambda s: units.percent(s.update_frac),
            "idle": lambda s: units.percent(s.idle_frac),
            "compute error": lambda s: units.percent(s.errors.median_frac),
            "compute predicted / measured": lambda s: units.ratio(s.errors.predicted_to_measured),
        },
        text={"stage", "layers"},
        note=(
            f"Measured. Idle: everything but busy{'; busy includes waiting for a core' * summary.shares_cores}. "
            f"Compute is {compute_time(summary.num_cores)}. Error: median over microbatches."
        ),
        empty="No training step was observed.",
    )


def compute_time(num_cores: int | None) -> str:
    """What compute seconds are, where processes share so many cores; None: each has its device."""
    return "wall time" if num_cores is None else "processor time, not wall time"


def idle_table(summary: RunSummary) -> Table:
    """The comparison's batches, one row per stage and policy, stages in the plan's order."""
    pairs = summary.comparison.pairs if summary.comparison else ()
    rows: list[tuple[str, StageStats]] = []
    for policy in (ARRIVAL, BALANCED):
        steps = [step for pair in pairs for step in (pair.arrival if policy == ARRIVAL else pair.balanced)]
        rows += [(POLICY_NAMES[policy], stats) for stats in stage_stats(steps, summary.plan)]
    order = list(dict.fromkeys(stats.stage for _, stats in rows))
    return make_table(
        "Idle time and balance per stage",
        sorted(rows, key=lambda row: order.index(row[1].stage)),
        {
            "stage": lambda row: row[1].stage,
            "policy": lambda row: row[0],
            "forward + backward": lambda row: units.percent(row[1].busy_frac),
            "waiting": lambda row: units.percent(row[1].wait_frac),
            "reduction + optimizer": lambda row: units.percent(row[1].update_frac),
            "idle": lambda row: units.percent(row[1].idle_frac),
            "largest / mean microbatch": lambda row: units.ratio(row[1].max_over_mean),
        },
        text={"stage", "policy"},
        note="Measured on the comparison's batches; shares of the step over all ranks of a stage. Idle: waiting, "
        "reduction and optimizer. Largest / mean: compute seconds of the microbatches of a step, averaged over steps; "
        "1.00x is even. A pipeline may gain from uneven microbatches in the right order.",
        empty=NOT_BLIND,
    )


def quarantine_table(quarantined: Sequence[QuarantinedSample]) -> Table:
    """Samples left out, at most `MAX_ROWS`."""
    more = len(quarantined) - MAX_ROWS
    columns = ("sample", "found by", "file", "reason")
    return Table(
        "Skipped samples",
        columns,
        tuple((q.sample_id, q.phase, q.path, q.reason) for q in quarantined[:MAX_ROWS]),
        frozenset(columns),
        f'{more} more: dflop sql "select * from v_quarantine"' if more > 0 else "",
        empty="None: every sample is valid.",
        num_shown=10,
    )


def correction_table(summary: RunSummary) -> Table:
    """Corrections at the end of the run: per module its level, then active buckets, or that which deviates most."""
    last_step = max((step.step for step in summary.steps), default=-1)
    rows: list[tuple[str, ...]] = []
    for buckets in summary.corrections:
        first, in_force = buckets[0], [c for c in buckets if c.is_in_force and len(buckets) > 1]
        sizes = f"{len(in_force)} of {len(buckets)} buckets" if len(buckets) > 1 else ""
        began = str(first.effective_step) if first.effective_step <= last_step else "next run"
        observations = units.count(max(c.num_observations for c in buckets))
        rows.append((first.module, "overall", began, units.ratio(first.level), "", sizes, observations))
        furthest = max(buckets, key=lambda c: abs(math.log(c.factor / c.level)))
        for c in in_force or [furthest] * (len(buckets) > 1):
            spread, active = units.percent(c.sd_frac), "yes" if c.is_in_force else "no, within noise"
            rows.append((c.module, _sizes(c), "", units.ratio(c.factor), spread, active, ""))
    errors = {found[0].module: found[0].residual_frac for found in summary.corrections}
    error_after = errors_of(timed_spans(summary.steps)).median_frac
    before = ", ".join(f"{module} {units.percent(frac)}" for module, frac in errors.items())
    said = f"Median error of predicted compute: as planned {units.percent(error_after)}, without corrections {before}. "
    return Table(
        "Cost corrections",
        ("module", "tokens of an item", "from step", "factor", "+-", "active", "observations"),
        tuple(rows),
        frozenset({"module", "tokens of an item", "active"}),
        said * bool(errors) + f"Newest per module, of {len(summary.correction_sets)}. Factor: measured / predicted "
        "compute seconds. Inactive length buckets use the overall factor: one that deviates no more than its "
        "uncertainty (+-) allows would add noise to plans.",
        empty="None: predictions stayed within 3 % of measurements, or nothing was observed.",
    )


def slow_rank_table(factors: Sequence[RankFactor]) -> Table:
    """The newest factor of each rank that says something, those active first."""
    newest = {f.rank: f for f in sorted(factors, key=lambda f: (f.attempt, f.observed_at_s, f.effective_step))}
    ordered = sorted(newest.values(), key=lambda f: (not f.is_in_force, -f.factor))
    return make_table(
        "Slow ranks",
        [f for f in ordered if f.is_in_force or f.factor - 2 * f.sd_frac > 1.05],
        {
            "rank": lambda f: str(f.rank),
            "place": lambda f: f"{f.module} pp{f.stage} dp{f.dp_rank}",
            "host": lambda f: f.host,
            "takes": lambda f: units.ratio(f.factor),
            "+-": lambda f: units.ratio(f.sd_frac),
            "active": lambda f: "yes" if f.is_in_force else "no",
            "from step": lambda f: str(f.effective_step),
        },
        text={"place", "host"},
        note="Takes: measured seconds / those of its peers for the same work. Active: the rank gets less work.",
    )


def memory_table(plan: Plan, limit_bytes: int, peaks: Sequence[RankMemory] = ()) -> Table:
    """Per stage the predicted peak and the measured one; no rows where the plan says nothing about memory.

    Args:
        plan: That ran last.
        limit_bytes: Of a process.
        peaks: Of the run; those of its last start count, since before it another plan may have run.
    """
    last = max((peak.attempt for peak in peaks), default=0)
    most: dict[tuple[str, str, int], int] = {}
    for peak in peaks:
        if peak.attempt == last:
            place = peak.kind, peak.module, peak.stage
            most[place] = max(peak.peak_bytes, most.get(place, 0))
    rows = [
        (
            name,
            pipe.stage_memory_bytes[stage],
            most.get(("allocated", pipe.module, stage)),
            most.get(("process", pipe.module, stage)),
        )
        for pipe, stage, name in stages_of_plan(plan)
        if stage < len(pipe.stage_memory_bytes)
    ]

    def size(num_bytes: int | None) -> str:
        return "-" if num_bytes is None else units.num_bytes(num_bytes)

    def share(num_bytes: int | None, of_bytes: int) -> str:
        return "-" if num_bytes is None or not of_bytes else units.percent(num_bytes / of_bytes)

    return make_table(
        "Memory per stage",
        rows if any(predicted > 0 for _, predicted, _, _ in rows) else (),
        {
            "stage": lambda row: row[0],
            "tensors, predicted": lambda row: size(row[1]),
            "of the limit": lambda row: share(row[1], limit_bytes),
            "tensors, measured": lambda row: size(row[2]),
            "of the predicted": lambda row: share(row[2], row[1]),
            "process size, measured": lambda row: size(row[3]),
        },
        text={"stage"},
        note=f"Peaks; limit: {units.num_bytes(limit_bytes)} of a process. Tensors are measured on GPUs only. "
        "Process size is its host memory, including interpreter, libraries and prefetched samples.",
        empty="The plan has no memory predictions.",
    )


def _speedup(label: str, found: Speedup, remark: str) -> tuple[str, str, str]:
    value, _, interval = units.speedup(found.mean, found.low, found.high).partition(" ")
    return label, value, interval.strip("()") or remark


def _sizes(bucket: Correction) -> str:
    if bucket.max_tokens >= ALL_TOKENS:
        return f"from {bucket.min_tokens}"
    return f"{bucket.min_tokens} to {bucket.max_tokens - 1}"
