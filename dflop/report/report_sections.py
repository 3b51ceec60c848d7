"""Parts of a report beside summary and drawings: facts, memory, slow ranks, what the calculator begins with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from dflop import units
from dflop.records import LLM, Plan, RankFactor, RankMemory
from dflop.report.calculator import USD_PER_GPU_HOUR, Calculator, make_calculator
from dflop.report.run_details import RunDetails
from dflop.report.summary import RunSummary
from dflop.report.tables import Table, layout_text, reproducibility, stage_layers, stage_name
from dflop.report.worth import WorthInputs, once_gpu_hours

MemoryRow = tuple[str, int, int | None]
"""(stage, predicted peak in bytes, measured peak or None)."""


def run_facts(summary: RunSummary, details: RunDetails) -> tuple[tuple[str, str], ...]:
    """(name, value) of what ran."""
    run, plan = summary.run, summary.plan
    planned = "" if details.num_steps_planned is None else f" of {details.num_steps_planned}"
    facts = [
        ("run", f"{run.name}, {run.state}"),
        *details.facts,
        ("hardware", run.hardware),
        ("processes", f"{plan.num_processes}: {layout_text(plan)}"),
        ("optimizer steps", f"{len(summary.steps)}{planned}, of {plan.global_batch_size} samples each"),
    ]
    if not math.isnan(mfu := median_mfu(summary, details)):
        facts.append(("model FLOPs utilisation", f"{units.percent(mfu)}, measured, median over steps"))
    return tuple(facts)


def plan_facts(summary: RunSummary, details: RunDetails) -> tuple[tuple[str, str], ...]:
    """(name, value) of the plan and why it was chosen."""
    plan = summary.plan
    facts = [
        ("layout", layout_text(plan)),
        ("layers", "; ".join(f"{name}: {layers}" for name, layers in _stage_layers(plan))),
        ("microbatches", f"{plan.num_microbatches} for a global batch of {plan.global_batch_size} samples"),
        ("why", plan.reason or "not recorded"),
    ]
    if details.cost_sources:
        facts.append(("costs", ", ".join(f"{module} {source}" for module, source in details.cost_sources)))
    return tuple(facts)


def memory_rows(plan: Plan, peaks: Sequence[RankMemory] = ()) -> tuple[MemoryRow, ...]:
    """One row per stage; nothing where the plan says nothing about memory.

    Args:
        plan: That ran last.
        peaks: Of the run; those of its last start count, since before it another plan may have run.
    """
    last = max((peak.attempt for peak in peaks), default=0)
    measured: dict[tuple[str, int], int] = {}
    for peak in peaks:
        if peak.attempt == last:
            place = peak.module, peak.stage
            measured[place] = max(peak.peak_bytes, measured.get(place, 0))
    pipes = (plan.module(LLM),) if plan.is_inline else tuple(sorted(plan.modules, key=lambda m: m.first_rank))
    rows = tuple(
        (stage_name(plan, m.module, stage), num_bytes, measured.get((m.module, stage)))
        for m in pipes
        for stage, num_bytes in enumerate(m.stage_memory_bytes)
    )
    return rows if any(num_bytes > 0 for _, num_bytes, _ in rows) else ()


def memory_table(rows: Sequence[MemoryRow], limit_bytes: int | None, kinds: Collection[str] = ()) -> Table:
    """Predicted beside measured peaks, and the limit.

    Args:
        rows: Of the stages.
        limit_bytes: Of a process.
        kinds: Of what was measured, as `RankMemory` has them.
    """
    notes = [f"Limit: {units.num_bytes(limit_bytes)} of a process."] if limit_bytes else []
    if all(measured is None for _, _, measured in rows):
        notes.append("Predicted when planning; in this run nobody measured.")
    elif "process" in kinds:
        notes.append(
            "Measured: the whole process, with interpreter, libraries and samples that wait; predicted: what training "
            "itself holds."
        )
    else:
        notes.append("Measured: what torch held on the device.")
    return Table(
        "Memory per stage",
        ("stage", "predicted peak", "of the limit", "measured peak", "of the limit, measured"),
        tuple(
            (
                stage,
                units.num_bytes(predicted),
                _share(predicted, limit_bytes),
                "-" if measured is None else units.num_bytes(measured),
                _share(measured, limit_bytes),
            )
            for stage, predicted, measured in rows
        ),
        frozenset({"stage"}),
        " ".join(notes),
    )


def slow_rank_table(factors: Sequence[RankFactor]) -> Table:
    """The newest factor of each rank, those in force first."""
    newest: dict[int, RankFactor] = {}
    for factor in sorted(factors, key=lambda f: (f.attempt, f.observed_at_s, f.effective_step)):
        newest[factor.rank] = factor
    ordered = sorted(newest.values(), key=lambda f: (not f.is_in_force, -f.factor))
    shown = [f for f in ordered if f.is_in_force or f.factor - 2 * f.sd_frac > 1.05]
    return Table(
        "Slow ranks",
        ("rank", "place", "host", "takes", "+-", "in force", "from step"),
        tuple(
            (
                str(f.rank),
                f"{f.module} pp{f.stage} dp{f.dp_rank}",
                f.host,
                units.ratio(f.factor),
                units.ratio(f.sd_frac),
                "yes" if f.is_in_force else "no",
                str(f.effective_step + 1),
            )
            for f in shown
        ),
        frozenset({"place", "host"}),
        "Takes: measured seconds over those of its peers for the same work. In force: it was given less of it."
        if shown
        else "",
    )


def median_mfu(summary: RunSummary, details: RunDetails) -> float:
    """Model FLOPs utilisation; NaN where the peak of the devices is not known."""
    step_s = {s.step: s.step_s for s in summary.steps}
    found = [
        f.model_flops / (f.peak_flops_per_s * step_s[f.step])
        for f in details.flops
        if step_s.get(f.step, 0.0) > 0 and f.peak_flops_per_s > 0
    ]
    return statistics.median(found) if found else math.nan


def run_calculator(summary: RunSummary, details: RunDetails) -> Calculator:
    """The calculator with what this run measured, or where it compared nothing with what was simulated."""
    compared = summary.comparison
    has_measured = compared is not None and compared.measured.num_batches > 0
    if compared is not None and has_measured:
        speedup = compared.measured
        speedups = speedup.mean, speedup.low, speedup.high
        how = f"measured on {speedup.num_batches} global batches of this run"
        bounds = "measured, 95 % interval" if speedup.has_interval else "too few batches for an interval"
    else:
        speedups = summary.plan.planned_speedup, math.nan, math.nan
        how, bounds = "simulated when planning: this run compared nothing", "not known"
    num_steps = details.num_steps_planned or len(summary.steps)
    given = WorthInputs(
        num_gpus=summary.plan.num_processes,
        num_steps=num_steps,
        step_s=summary.step_s,
        speedup=speedups[0],
        speedup_low=speedups[1],
        speedup_high=speedups[2],
        usd_per_gpu_hour=USD_PER_GPU_HOUR,
        once_gpu_hours=once_gpu_hours(details.jobs),
    )
    origins = {
        "num_gpus": "of the plan of this run",
        "num_steps": "of this run: put in those of yours",
        "step_s": "measured in this run, median; waiting for input comes on top",
        "speedup": how,
        "speedup_low": bounds,
        "speedup_high": bounds,
        "usd_per_gpu_hour": "a guess: put in yours",
        "once_gpu_hours": "measured: this run's jobs besides training and comparing; 0 where the store had it all",
    }
    return make_calculator(given, origins, "process" if summary.num_cores is not None else "GPU")


def reproduction(summary: RunSummary, details: RunDetails) -> tuple[tuple[str, str], ...]:
    """(name, value) of what is needed to run the same thing again."""
    facts = list(reproducibility(summary))
    for seen in sorted(details.inputs, key=lambda i: i.observed_at_s):
        read = f"snapshot {seen.snapshot_seq}, revision {seen.snapshot_revision}"
        profiles = f"data profile {seen.data_profile_key}, model profile {seen.model_profile_key}"
        facts.append((f"read by {seen.job}", f"{read}; {profiles}; cost tables {', '.join(seen.table_ids) or 'none'}"))
    return tuple(facts)


def _stage_layers(plan: Plan) -> list[tuple[str, str]]:
    pipes = (plan.module(LLM),) if plan.is_inline else tuple(sorted(plan.modules, key=lambda m: m.first_rank))
    return [
        (stage_name(plan, m.module, stage), stage_layers(plan, m.module, stage))
        for m in pipes
        for stage in range(m.parallel.pp)
    ]


def _share(num_bytes: int | None, limit_bytes: int | None) -> str:
    return "-" if num_bytes is None or not limit_bytes else units.percent(num_bytes / limit_bytes)
