"""What trainers would take for the same global batches of one's own data: rows and page of `dflop compare CONFIG`.

All simulated. A further figure of a competitor is a field of `Competitor`, with a column in `COLUMNS` (for programs)
and one in `_table` (for people).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dflop import __version__, units
from dflop.compare.contest import (
    CONTEXT,
    DEFAULT,
    EXPERT,
    EXPERT_EP,
    GROUPED,
    IF_COMPILED,
    OURS,
    PACKED,
    SEQUENCE,
    SHARDED,
    SHARDED_EP,
    TUNED,
    Contest,
    Setting,
    contest,
    entry_text,
)
from dflop.compare.experts.expert_plan import ExpertPlan
from dflop.compare.outlook import Outlook
from dflop.config import Config
from dflop.data.distribution import sample_batches
from dflop.records.speedup import Speedup
from dflop.report.competitor_bars import competitor_bars
from dflop.report.html_page import GLOSSARY, Drawing, Page, Section
from dflop.report.tables import Table, make_table
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
    SEQUENCE: "FSDP2 + SP, tokens balanced",
    CONTEXT: "Megatron + CP, tokens balanced",
    SHARDED_EP: "FSDP2 + EP, tokens balanced",
    EXPERT_EP: "Megatron + EP, LPT on LLM tokens",
    **{policy: f"dflop's plan, {policy}" for policy in POLICIES},
    OURS: "dflop",
    IF_COMPILED: "dflop, if its layers were compiled",
}
"""Titles of competitors, data-blind ones first."""
BOUND = "perfect balance, no bubble"
NOTES = (
    "Simulated: every number. Plans were made on some batches of your data and evaluated on held-out ones.",
    "Speedups are over {baseline}. Geometric means over batches, the same for all, with their 95 % interval. Uniform: "
    "one layout for the whole model; in arrival order with equal counts unless its name says otherwise.",
    "By data sheets FSDP2 and Megatron-LM are priced as compiled programs or fused kernels, as their users run them, "
    "dflop and uniform plans as eager ones, which they are. By measured costs all are priced alike.",
    "The bound is what the step would take with every GPU busy all the time, at the best tensor-parallel degree.",
    "A name with (exceeds memory): its plan does not fit, or some batch or sample exceeds memory.",
)


@dataclass(frozen=True, slots=True)
class Competitor:
    """A trainer on held-out batches."""

    what: str
    entry: ExpertPlan | None
    """None: of the bound."""
    step_s: float
    """Mean over batches."""
    tokens_per_s_per_gpu: float
    mfu_frac: float
    """NaN where the peak of the devices is not known."""
    speedup: Speedup
    """Over `Contest.baseline`."""
    idle_frac: float
    gpu_hours: float
    """All steps of the training on all GPUs, whether the plan uses them or not."""
    usd: float


COLUMNS: Mapping[str, Callable[[Competitor], object]] = {
    "what": lambda c: c.what,
    "layout": lambda c: entry_text(c.entry) if c.entry else "",
    "microbatches": lambda c: c.entry.plan.num_microbatches if c.entry else None,
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
    setting = Setting("your data", "your data", problem, tuple(unseen), outlook.source, workload, outlook.compiled)
    return contest(setting, say, policies=policies)


def competitors(found: Contest, num_steps: int, usd_per_gpu_hour: float) -> list[Competitor]:
    """The data-blind ones first, the bound last; those without a plan are left out."""
    baseline = found.baseline

    def competitor(
        what: str, entry: ExpertPlan | None, step_s: float, speedup: Speedup, idle_frac: float
    ) -> Competitor:
        hours = gpu_hours(step_s, num_steps=num_steps, num_gpus=found.setting.num_gpus)
        speed = found.setting.workload.throughput(step_s, entry.plan if entry else None)
        use = (speed.tokens_per_s_per_gpu, speed.mfu_frac)
        return Competitor(what, entry, step_s, *use, speedup, idle_frac, hours, hours * usd_per_gpu_hour)

    rows = []
    for key, what in NAMES.items():
        if (steps := found.steps.get(key)) is not None:
            name = what + " (exceeds memory)" * found.exceeds_memory(key)
            speedup = found.speedup(key, baseline)
            rows.append(competitor(name, found.entries[key], steps.mean_s, speedup, steps.mean_idle_frac))
    bound_s = sum(found.bound_s) / len(found.bound_s)
    bound = Speedup(found.bound_over(baseline), math.nan, math.nan, 0)
    return [*rows, competitor(BOUND, None, bound_s, bound, 0.0)]


def comparison_rows(found: Contest, num_steps: int, usd_per_gpu_hour: float) -> list[tuple[object, ...]]:
    """Rows of `COLUMNS`, for programs."""
    return [tuple(of(row) for of in COLUMNS.values()) for row in competitors(found, num_steps, usd_per_gpu_hour)]


def data_page(found: Contest, config: Config, command: str, num_steps: int, usd_per_gpu_hour: float) -> Page:
    """The page of `--html`.

    Args:
        found: What was compared.
        config: Of the run that it is about.
        command: That makes the page again.
        num_steps: Optimizer steps of the training whose cost is estimated.
        usd_per_gpu_hour: Price; 0: unknown, the page shows no cost.
    """
    rows, baseline = competitors(found, num_steps, usd_per_gpu_hour), found.baseline
    bars = [(c.what, c.speedup.mean, c.speedup.low, c.speedup.high) for c in rows[:-1]]
    name, steps = NAMES[baseline] if baseline else "a baseline", found.steps[OURS]
    caption = f"Times as fast as {name}; whiskers: 95 % intervals; dashed: the bound"
    step = idle = "no baseline fits"
    drawings: tuple[Drawing, ...] = ()
    if baseline:
        base = found.steps[baseline]
        step, idle = f"{name}: {units.seconds(base.mean_s)}", f"{name}: {units.percent(base.mean_idle_frac)}"
        picture = competitor_bars("competitors", caption, bars, found.bound_over(baseline), f"times as fast as {name}")
        drawings = (Drawing(picture.svg(), f"{caption}."),)
    facts = (
        ("command", command),
        ("configuration key", config.key),
        ("costs", found.setting.cost_name),
        ("batches", f"{len(found.setting.unseen)} held-out"),
        ("plan", f"{found.ours.plan_id}: {found.ours.reason}"),
        ("dflop", __version__),
    )
    return Page(
        title="dflop on your data",
        subtitle=f"{config.name}: {found.setting.num_gpus} devices, costs {found.setting.cost_name}.",
        kinds=("simulated",),
        verdict=verdict(found),
        numbers=(
            ("step, simulated", units.seconds(steps.mean_s), step),
            ("idle, simulated", units.percent(steps.mean_idle_frac), idle),
            ("step over the bound", units.ratio(found.over_bound), "1.00x is the optimum"),
        ),
        sections=(
            Section(
                "speedups",
                "Speedups, their bound and their value",
                ("simulated",),
                drawings=drawings,
                tables=(_table(found, rows, num_steps, has_price=usd_per_gpu_hour > 0),),
            ),
            Section(
                "how",
                "How to read this",
                notes=(*(note.format(baseline=_baseline_text(found)) for note in NOTES), GLOSSARY),
            ),
            Section("reproduce", "To reproduce", facts=facts),
        ),
    )


def verdict(found: Contest) -> str:
    """What dflop gains over the best of what experts run and over the best uniform plan, where these fit."""
    parts, baseline = [], found.baseline
    if found.best_expert:
        parts.append(_over(found.over_experts, f"the best expert baseline ({NAMES[found.best_expert]})"))
    if baseline and baseline != found.best_expert:
        parts.append(_over(found.speedup(OURS, baseline), _baseline_text(found)))
    if not parts:
        return "Simulated: no baseline fits in memory, so no gain is claimed."
    more = f"with every GPU busy all the time it would be {units.ratio(found.bound_over(baseline))}"
    if baseline == found.best_expert:
        more += "; no uniform plan in arrival order fits in memory"
    return f"Simulated: dflop's plan is {' and '.join(parts)}; {more}."


def _baseline_text(found: Contest) -> str:
    if found.baseline is None:
        return "nothing: no baseline fits in memory"
    if found.baseline == found.best_expert:
        return f"{NAMES[found.baseline]}, since no uniform plan in arrival order fits in memory"
    which = "the best" if found.baseline == TUNED else "a"
    return f"{which} uniform plan in arrival order that fits ({NAMES[found.baseline]})"


def _over(found: Speedup, what: str) -> str:
    noise = " (no difference beyond noise)" * (found.has_interval and not found.is_conclusive)
    return f"{units.speedup(found.mean, found.low, found.high)} as fast as {what}{noise}"


def comparison_table(found: Contest, num_steps: int, usd_per_gpu_hour: float) -> Table:
    """The same for people, on a terminal: what fits 80 columns."""
    rows = competitors(found, num_steps, usd_per_gpu_hour)
    whole = _table(found, rows, num_steps, has_price=usd_per_gpu_hour > 0)
    return whole.without("micro-batches", "95 %", "idle")


def _table(found: Contest, rows: list[Competitor], num_steps: int, *, has_price: bool) -> Table:
    columns: dict[str, Callable[[Competitor], str]] = {
        "what": lambda c: c.what,
        "layout": lambda c: entry_text(c.entry, found.setting.num_gpus) if c.entry else "",
        "micro-batches": lambda c: str(c.entry.plan.num_microbatches) if c.entry else "",
        "step": lambda c: units.seconds(c.step_s),
        "tok/s/GPU": lambda c: f"{c.tokens_per_s_per_gpu:,.0f}",
        "MFU": lambda c: units.percent(c.mfu_frac),
        "speedup": lambda c: units.speedup(c.speedup.mean, math.nan, math.nan),
        "95 %": lambda c: units.interval(c.speedup.low, c.speedup.high),
        "idle": lambda c: units.percent(c.idle_frac),
        "GPU-h": lambda c: f"{c.gpu_hours:,.1f}",
    }
    if has_price:
        columns["USD"] = lambda c: f"{c.usd:,.0f}"
    title = f"The same batches, and {units.count(num_steps)} steps"
    return make_table(title, rows, columns, {"what", "layout"}, "Means over batches.")
