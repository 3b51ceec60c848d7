"""What trainers would take on one's own data, as one HTML page: `dflop compare CONFIG --html FILE`. All simulated."""

from __future__ import annotations

import math
from pathlib import Path

from dflop import __version__, units
from dflop.compare.suite.contest import OURS, TUNED, Contest
from dflop.compare.trainers import BOUND, comparison_rows
from dflop.config import Config
from dflop.report.html_page import Drawing, Page, Section
from dflop.report.suite_plots import competitors_svg
from dflop.report.tables import Table

NOTES = (
    "Simulated: every number. Plans were made on some batches of your data and judged on others.",
    "Speed-ups are over the best uniform plan of all that fit: one layout for the whole model, arrival order, equal "
    "counts. Geometric means over batches, the same for all, with their 95 % interval.",
    "The bound is what the step would take with every GPU busy all the time, at the best tensor-parallel degree.",
    "A name with (exceeds memory): its plan does not fit, or some batch or sample has more than it has room for.",
)


def data_page(found: Contest, config: Config, config_file: Path, num_steps: int, usd_per_gpu_hour: float) -> Page:
    """The page.

    Args:
        found: What was compared.
        config: Of the run that it is about.
        config_file: Where that lies.
        num_steps: Optimizer steps of the training whose cost is told.
        usd_per_gpu_hour: Price; 0: unknown, the page shows no cost.
    """
    rows = comparison_rows(found, num_steps, usd_per_gpu_hour)
    bars = [(str(row[0]), _number(row[4]), _number(row[5]), _number(row[6])) for row in rows if row[0] != BOUND]
    caption = "Times as fast as the tuned uniform plan; whiskers: 95 % intervals; dashed: the bound"
    facts = (
        ("command", f"dflop compare {config_file}"),
        ("configuration key", config.key),
        ("costs", found.setting.cost_name),
        ("batches", f"{len(found.setting.unseen)}, none of which was planned for"),
        ("plan", f"{found.plans.ours.plan_id}: {found.plans.ours.reason}"),
        ("dflop", __version__),
    )
    return Page(
        title="dflop on your data",
        subtitle=f"{config.name}: {found.setting.num_gpus} devices, costs {found.setting.cost_name}.",
        kinds=("simulated",),
        verdict=_verdict(found),
        numbers=_numbers(found),
        sections=(
            Section(
                "speedups",
                "Speed-ups, their bound and what they are worth",
                ("simulated",),
                drawings=(Drawing(competitors_svg("competitors", caption, bars, found.bound_speedup), f"{caption}."),),
                tables=(_table(rows, num_steps, usd_per_gpu_hour),),
            ),
            Section("how", "How to read this", notes=NOTES),
            Section("reproduce", "To reproduce", facts=facts),
        ),
    )


def _verdict(found: Contest) -> str:
    ours = found.speedup(OURS)
    assert ours is not None
    times = units.speedup(ours.mean, ours.low, ours.high)
    if ours.has_interval and not ours.is_conclusive:
        return f"Simulated: no difference beyond noise to the best uniform plan, {times}."
    bound = f"With every GPU busy all the time it would be {units.ratio(found.bound_speedup)}."
    return f"Simulated: dflop is {times} as fast as the best uniform plan. {bound}"


def _numbers(found: Contest) -> tuple[tuple[str, str, str], ...]:
    steps, tuned = found.steps[OURS], found.steps[TUNED]
    return (
        ("step, simulated", units.seconds(steps.mean_s), f"uniform, tuned: {units.seconds(tuned.mean_s)}"),
        (
            "idle, simulated",
            units.percent(steps.mean_idle_frac),
            f"uniform, tuned: {units.percent(tuned.mean_idle_frac)}",
        ),
        ("step over the bound", units.ratio(found.over_bound), "1.00x cannot be beaten"),
    )


def _table(rows: list[tuple[object, ...]], num_steps: int, usd_per_gpu_hour: float) -> Table:
    header = ("what", "layout", "micro-batches", "step", "speed-up", "95 %", "idle", "GPU-hours")
    priced = usd_per_gpu_hour > 0
    return Table(
        f"The same batches, and {units.count(num_steps)} steps",
        (*header, *["USD"] * priced),
        tuple(_cells(row)[: len(header) + priced] for row in rows),
        frozenset({"what", "layout"}),
        "Means over batches.",
    )


def _cells(row: tuple[object, ...]) -> tuple[str, ...]:
    what, layout, num_microbatches, *_ = row
    step_s, speedup, low, high, idle_frac, gpu_hours, usd = (_number(value) for value in row[3:])
    interval = "" if math.isnan(low) else f"{low:.3f}-{high:.3f}"
    return (
        str(what), str(layout or ""), "" if num_microbatches is None else str(num_microbatches), units.seconds(step_s),
        units.speedup(speedup, math.nan, math.nan), interval, units.percent(idle_frac),
        f"{gpu_hours:,.1f}", f"{usd:,.0f}",
    )  # fmt: skip


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
