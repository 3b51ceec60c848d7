"""What trainers would take for the same global batches of one's own data: rows and page of `dflop compare CONFIG`.

All simulated. A further figure of a competitor is a field of `Competitor`, with a column in `COLUMNS` (for programs)
and one in `_table` (for people).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflop import __version__, units
from dflop.compare.outlook import Outlook
from dflop.compare.suite.cases import Setting
from dflop.compare.suite.contest import (
    DEFAULT,
    EXPERT,
    GROUPED,
    OURS,
    PACKED,
    REFERENCE,
    SHARDED,
    TUNED,
    Contest,
    contest,
)
from dflop.config import Config
from dflop.data.distribution import sample_batches
from dflop.plan.drafts import holding
from dflop.records import Plan
from dflop.records.speedup import Speedup
from dflop.report.html_page import Drawing, Page, Section
from dflop.report.suite_plots import competitors as bars_of
from dflop.report.tables import Table, layout_text, make_table
from dflop.report.worth import gpu_hours
from dflop.run.messages import Say
from dflop.schedule.policies import POLICIES

NAMES: Mapping[str, str] = {
    DEFAULT: "uniform, default",
    TUNED: "uniform, tuned",
    GROUPED: "uniform, grouped by length",
    PACKED: "uniform, LPT on LLM tokens",
    EXPERT: "Megatron expert, LPT on LLM tokens",
    SHARDED: "FSDP2, tokens balanced over ranks",
    REFERENCE: "authors' plan, balanced",
    **{policy: f"dflop's plan, {policy}" for policy in POLICIES},
    OURS: "dflop",
}
"""Of competitors, data-blind ones first."""
BOUND = "perfect balance, no bubble"
NOTES = (
    "Simulated: every number. Plans were made on some batches of your data and evaluated on held-out ones.",
    "Speedups are over the best uniform plan of all that fit: one layout for the whole model, arrival order, equal "
    "counts. Geometric means over batches, the same for all, with their 95 % interval.",
    "The bound is what the step would take with every GPU busy all the time, at the best tensor-parallel degree.",
    "A name with (exceeds memory): its plan does not fit, or some batch or sample exceeds memory.",
)


@dataclass(frozen=True, slots=True)
class Competitor:
    """A trainer on the batches that nobody planned for."""

    what: str
    plan: Plan | None
    step_s: float
    """Mean over batches."""
    tokens_per_s_per_gpu: float
    mfu_frac: float
    """NaN where the peak of the devices is not known."""
    speedup: Speedup
    """Over the tuned uniform plan."""
    idle_frac: float
    gpu_hours: float
    """Of all steps of the training, on all GPUs, whether a plan uses them or not."""
    usd: float


COLUMNS: Mapping[str, Callable[[Competitor], object]] = {
    "what": lambda c: c.what,
    "layout": lambda c: layout_text(c.plan) if c.plan else "",
    "microbatches": lambda c: c.plan.num_microbatches if c.plan else None,
    "step_s": lambda c: c.step_s,
    "tokens_per_s_per_gpu": lambda c: c.tokens_per_s_per_gpu,
    "mfu_frac": lambda c: None if math.isnan(c.mfu_frac) else c.mfu_frac,
    "speedup": lambda c: None if math.isnan(c.speedup.mean) else c.speedup.mean,
    "speedup_low": lambda c: c.speedup.low if c.speedup.has_interval else None,
    "speedup_high": lambda c: c.speedup.high if c.speedup.has_interval else None,
    "idle_frac": lambda c: c.idle_frac,
    "gpu_hours": lambda c: c.gpu_hours,
    "usd": lambda c: c.usd,
}


def compare_on_data(outlook: Outlook, num_batches: int, seed: int, say: Say, policies: Sequence[str] = ()) -> Contest:
    """Plans everything and judges it on batches drawn anew, our plan also under other policies.

    Raises:
        InfeasiblePlanError: nothing fits in memory.
    """
    problem = outlook.problem
    unseen = sample_batches(outlook.shapes, problem.global_batch_size, num_batches, seed)
    workload = replace(outlook.workload, batches=unseen)
    setting = Setting("your data", "your data", problem, tuple(unseen), outlook.source, workload)
    return contest(setting, say, policies=policies)


def competitors(found: Contest, num_steps: int, usd_per_gpu_hour: float) -> list[Competitor]:
    """The data-blind ones first, the bound last; those without a plan are left out."""
    plans = found.plans
    made = {GROUPED: plans.tuned, **plans.named}

    def competitor(what: str, plan: Plan | None, step_s: float, speedup: Speedup, idle_frac: float) -> Competitor:
        hours = gpu_hours(step_s, num_steps=num_steps, num_gpus=found.setting.num_gpus)
        speed = found.setting.workload.throughput(step_s, plan)
        use = (speed.tokens_per_s_per_gpu, speed.mfu_frac)
        return Competitor(what, plan, step_s, *use, speedup, idle_frac, hours, hours * usd_per_gpu_hour)

    rows = []
    for key, what in NAMES.items():
        plan = made.get(key, plans.ours)
        if (steps := found.steps.get(key)) is not None:
            cost = plans.expert.cost if plans.expert and key == EXPERT else found.setting.problem.cost
            has_room = plan is not None and holding(replace(found.setting.problem, cost=cost), plan) is not None
            is_over = steps.num_over_cap > 0 or not has_room
            name = what + " (exceeds memory)" * is_over
            rows.append(competitor(name, plan, steps.mean_s, found.speedup(key), steps.mean_idle_frac))
    bound_s = sum(found.bound_s) / len(found.bound_s)
    return [*rows, competitor(BOUND, None, bound_s, Speedup(found.bound_speedup, math.nan, math.nan, 0), 0.0)]


def comparison_rows(found: Contest, num_steps: int, usd_per_gpu_hour: float) -> list[tuple[object, ...]]:
    """Rows of `COLUMNS`, for programs."""
    return [tuple(of(row) for of in COLUMNS.values()) for row in competitors(found, num_steps, usd_per_gpu_hour)]


def data_page(found: Contest, config: Config, config_file: Path, num_steps: int, usd_per_gpu_hour: float) -> Page:
    """The page of `--html`.

    Args:
        found: What was compared.
        config: Of the run that it is about.
        config_file: Where that lies.
        num_steps: Optimizer steps of the training whose cost is estimated.
        usd_per_gpu_hour: Price; 0: unknown, the page shows no cost.
    """
    rows = competitors(found, num_steps, usd_per_gpu_hour)
    bars = [(c.what, c.speedup.mean, c.speedup.low, c.speedup.high) for c in rows[:-1]]
    caption = "Times as fast as the tuned uniform plan; whiskers: 95 % intervals; dashed: the bound"
    steps, tuned = found.steps[OURS], found.steps.get(TUNED)
    step, idle = (units.seconds(tuned.mean_s), units.percent(tuned.mean_idle_frac)) if tuned else ("none fits", "-")
    drawings: tuple[Drawing, ...] = ()
    if tuned:
        drawings = (Drawing(bars_of("competitors", caption, bars, found.bound_speedup).svg(), f"{caption}."),)
    facts = (
        ("command", f"dflop compare {config_file}"),
        ("configuration key", config.key),
        ("costs", found.setting.cost_name),
        ("batches", f"{len(found.setting.unseen)}held-out"),
        ("plan", f"{found.plans.ours.plan_id}: {found.plans.ours.reason}"),
        ("dflop", __version__),
    )
    return Page(
        title="dflop on your data",
        subtitle=f"{config.name}: {found.setting.num_gpus} devices, costs {found.setting.cost_name}.",
        kinds=("simulated",),
        verdict=verdict(found),
        numbers=(
            ("step, simulated", units.seconds(steps.mean_s), f"uniform, tuned: {step}"),
            ("idle, simulated", units.percent(steps.mean_idle_frac), f"uniform, tuned: {idle}"),
            ("step over the bound", units.ratio(found.over_bound), "1.00x is the optimum"),
        ),
        sections=(
            Section(
                "speedups",
                "Speedups, their bound and their value",
                ("simulated",),
                drawings=drawings,
                tables=(_table(rows, num_steps, has_price=usd_per_gpu_hour > 0),),
            ),
            Section("how", "How to read this", notes=NOTES),
            Section("reproduce", "To reproduce", facts=facts),
        ),
    )


def verdict(found: Contest) -> str:
    """What dflop gains over the best of what experts run and over the best uniform plan."""
    parts = []
    if found.best_expert:
        parts.append(_over(found.over_experts, f"the best expert baseline ({NAMES[found.best_expert]})"))
    if TUNED in found.steps:
        parts.append(_over(found.speedup(OURS), "the best uniform plan in arrival order"))
    gains = f"dflop's plan is {' and '.join(parts)}" if parts else "dflop's plan fits in memory"
    if TUNED not in found.steps:
        return f"Simulated: {gains}; no uniform plan fits in memory."
    return f"Simulated: {gains}; with every GPU busy all the time it would be {units.ratio(found.bound_speedup)}."


def _over(found: Speedup, what: str) -> str:
    noise = " (no difference beyond noise)" * (found.has_interval and not found.is_conclusive)
    return f"{units.speedup(found.mean, found.low, found.high)} as fast as {what}{noise}"


def comparison_table(found: Contest, num_steps: int, usd_per_gpu_hour: float) -> Table:
    """The same for people, on a terminal: what fits 80 columns."""
    whole = _table(competitors(found, num_steps, usd_per_gpu_hour), num_steps, has_price=usd_per_gpu_hour > 0)
    return whole.without("micro-batches", "95 %", "idle")


def _table(rows: list[Competitor], num_steps: int, *, has_price: bool) -> Table:
    columns: dict[str, Callable[[Competitor], str]] = {
        "what": lambda c: c.what,
        "layout": lambda c: layout_text(c.plan) if c.plan else "",
        "micro-batches": lambda c: str(c.plan.num_microbatches) if c.plan else "",
        "step": lambda c: units.seconds(c.step_s),
        "tok/s/GPU": lambda c: f"{c.tokens_per_s_per_gpu:,.0f}",
        "MFU": lambda c: units.percent(c.mfu_frac),
        "speedup": lambda c: units.speedup(c.speedup.mean, math.nan, math.nan),
        "95 %": lambda c: f"{c.speedup.low:.3f}-{c.speedup.high:.3f}" if c.speedup.has_interval else "",
        "idle": lambda c: units.percent(c.idle_frac),
        "GPU-h": lambda c: f"{c.gpu_hours:,.1f}",
    }
    if has_price:
        columns["USD"] = lambda c: f"{c.usd:,.0f}"
    title = f"The same batches, and {units.count(num_steps)} steps"
    return make_table(title, rows, columns, {"what", "layout"}, "Means over batches.")
