"""Tables as plain text cells, which terminal, Markdown and HTML show alike, and names of what a plan is made of.

Headers say where a number comes from: `measured`, `simulated` (a whole step) or `predicted` (one span, cost model).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dflop import units
from dflop.records import LLM, ModulePlan, Plan, PlanProgram

if TYPE_CHECKING:  # who names a layout, as `dflop runs list` does, needs no planner
    from dflop.cost.throughput import Throughput
    from dflop.plan.robust import Regret

Item = TypeVar("Item")

POLICY_NAMES = {
    "arrival": "arrival",
    "length_grouped": "length-grouped",
    "token_lpt": "longest first",
    "token_kk": "token-balanced",
    "balanced": "balanced",
}
"""Titles of the policies that a run's comparison trains, in order."""


@dataclass(frozen=True, slots=True)
class Table:
    """Text cells with a title; columns whose header is in `text_columns` align left, numbers right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: frozenset[str] = frozenset()
    note: str = ""
    empty: str = ""
    """What a page says where there is no row; empty: it does not show the table then."""
    num_shown: int = 0
    """Rows that a page shows at once, with the rest folded; 0: all."""

    def without(self, *columns: str) -> Table:
        """The same with fewer columns."""
        kept = [i for i, name in enumerate(self.header) if name not in columns]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return replace(self, header=tuple(self.header[i] for i in kept), rows=rows)


def make_table(
    title: str,
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], str]],
    text: Collection[str] = (),
    note: str = "",
    empty: str = "",
    num_shown: int = 0,
) -> Table:
    """A table with a row per item; `columns` says what each column shows of it, `text` which ones are words."""
    rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
    return Table(title, tuple(columns), rows, frozenset(text), note, empty, num_shown)


def layout_text(plan: Plan, num_gpus: int = 0) -> str:
    """`vision dp2 | llm pp2 dp1`: degrees of every module in rank order; tp, and pp of an encoder, only above 1.

    `colocated pp2 dp4` where one chain holds all modules. `recompute` and one of `ZeRO-1`, `FSDP2` and `HSDP8`, of a
    group of 8, stand where they hold. A plan with fewer ranks than `num_gpus` says so: `..., uses 6 of 8 GPUs`.
    """
    names = {grid[-1].module: "+".join(m.module for m in grid) for grid in plan.grids}
    places = [(names[p.module] if len(names) > 1 else "colocated", p) for p in in_rank_order(plan)]
    used = f", uses {plan.num_processes} of {num_gpus} GPUs" * (plan.num_processes < num_gpus)
    return " | ".join(_place_text(*place) for place in places) + used


def in_rank_order(plan: Plan) -> list[ModulePlan]:
    """The plan's pipes."""
    return sorted(plan.pipes, key=lambda m: m.first_rank)


def stages_of_plan(plan: Plan) -> Iterator[tuple[ModulePlan, int, str]]:
    """(pipe, stage, its name) in rank order."""
    for pipe in in_rank_order(plan):
        for stage in range(pipe.parallel.pp):
            yield pipe, stage, stage_name(plan, pipe.module, stage)


def stage_name(plan: Plan, module: str, stage: int) -> str:
    """`llm pp1`; `stage 1` of a colocated plan, whose stages have the LLM's name and may hold layers of any module."""
    return f"stage {stage}" if len(plan.grids) == 1 else f"{module} pp{stage}"


def stage_layers(plan: Plan, module: str, stage: int) -> str:
    """`vision 21 + llm 3`: layers of every module on a stage; empty for a stage that only an earlier plan had."""
    grid = next((grid for grid in plan.grids if any(m.module == module for m in grid)), ())
    held = {m.module: m.layers_per_stage for m in grid}
    return " + ".join(f"{name} {of[stage]}" for name, of in held.items() if stage < len(of) and of[stage])


def throughput_text(found: Throughput, num_samples: int, usd_per_gpu_hour: float = 0.0) -> str:
    """What a step time means, in a line; all of it is simulated where the step is."""
    price = f", {found.epoch_gpu_hours * usd_per_gpu_hour:,.0f} USD" * bool(usd_per_gpu_hour)
    use = "" if math.isnan(found.mfu_frac) else f", MFU {found.mfu_frac:.0%} (HFU {found.hfu_frac:.0%})"
    return (
        f"{found.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{use}, {_figure(found.samples_per_s)} samples/s; "
        f"an epoch of {units.count(num_samples)} samples takes {_figure(found.epoch_gpu_hours)} GPU-hours{price}"
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def regret_text(found: Regret) -> str:
    """How a plan does where encoders take more or less time than its costs say."""
    case = f"if encoders took {found.factor:g} times as long, this plan would"
    if found.frac < 0.0005:
        return f"{case} still be the fastest"
    return f"{case} be {units.percent(found.frac)} slower than the best plan there, {layout_text(found.best)}"


def program_table(programs: Sequence[PlanProgram]) -> Table:
    """What is proven of all plans, by the number of microbatches."""
    return make_table(
        "Programs",
        programs,
        {
            "micro-batches": lambda p: str(p.num_microbatches),
            "status": lambda p: p.status,
            "formula": lambda p: units.seconds(p.objective_s),
            "bound": lambda p: units.seconds(p.bound_s),
            "gap": lambda p: units.percent(p.gap_frac),
            "grids": lambda p: units.count(p.num_columns),
            "within bounds": lambda p: units.count(p.num_columns_left),
            "saved by one more process": lambda p: units.seconds(p.process_price_s),
        },
        text={"status"},
    )


def plan_table(plans: Sequence[Plan], speeds: Sequence[Throughput] = (), num_gpus: int = 0) -> Table:
    """Candidates in their order, the plan that ran first.

    Args:
        plans: The candidates.
        speeds: What their step times mean; without them the table says nothing of it.
        num_gpus: Of the cluster; rows of plans that leave some idle say so.
    """
    known = dict(zip((p.plan_id for p in plans), speeds, strict=False))
    means: dict[str, Callable[[Plan], str]] = {
        "tokens/s/GPU": lambda p: f"{known[p.plan_id].tokens_per_s_per_gpu:,.0f}",
        "MFU": lambda p: units.percent(known[p.plan_id].mfu_frac),
    }
    return make_table(
        "Plan and next-best plans",
        plans,
        {
            "rank": lambda p: str(p.candidate_rank),
            "layout": lambda p: layout_text(p, num_gpus),
            "micro-batches": lambda p: str(p.num_microbatches),
            "step simulated": lambda p: units.seconds(p.predicted_step_s),
            **(means if known else {}),
            "arrival order simulated": lambda p: units.seconds(p.baseline_step_s),
            "uniform simulated": lambda p: units.seconds(p.uniform_step_s),
            "processes": lambda p: str(p.num_processes),
            "reason": lambda p: p.reason,
        },
        text={"layout", "reason"},
        note=(
            "Steps include gradient synchronization and optimizer. Arrival order: equal counts, on this layout. "
            "Uniform: the best plan with one layout for the whole model, in arrival order."
        ),
        empty="No candidates are recorded.",
        num_shown=8,
    )


def _place_text(name: str, module: ModulePlan) -> str:
    p = module.parallel
    degrees = [f"tp{p.tp}"] * (p.tp > 1) + [f"cp{p.cp}"] * (p.cp > 1) + [f"ep{p.ep}"] * (p.ep > 1)
    degrees += [f"pp{p.pp}"] * (p.pp > 1 or module.module == LLM) + [f"dp{p.dp}"]
    return " ".join([name, *degrees, *filter(None, (module.recomputation, module.offloading, module.sharding))])
