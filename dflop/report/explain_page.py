"""Why a plan is the plan: where its step goes, what limits it, and what other circumstances would do. All simulated."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from dflop import units
from dflop.plan.limits import BINDING_FRAC, Limit
from dflop.records import Plan, to_dict
from dflop.report.tables import Table, layout_text
from dflop.report.terminal import print_table

MAX_CANDIDATES = 8
"""Plans shown to people; programs get all."""
NO_EDGE = 1000


@dataclass(frozen=True, slots=True)
class StageUse:
    """One stage of the plan; seconds are means over its data-parallel ranks and the sampled batches."""

    stage: str
    """`vision pp0`; in an inline plan `stage 0`."""
    layers: str
    """`vision 21 + llm 3`."""
    num_gpus: int
    busy_s: float
    idle_s: float
    """Within the pipeline: gradient synchronisation and optimizer come behind it."""
    memory_bytes: int
    usable_bytes: int


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Shares of the time of all processes of the cluster over a step; the first four add up to 1."""

    busy_frac: float
    idle_frac: float
    """Waiting within the pipeline."""
    sync_frac: float
    unused_frac: float
    """Of processes without a seat in the plan."""
    even_idle_frac: float
    """Idle time if all microbatches were alike: the rest of the pipeline's own. NaN where processes share cores."""


@dataclass(frozen=True, slots=True)
class Variation:
    """The best plan under other circumstances."""

    name: str
    num_gpus: int
    num_samples: float
    """Of a global batch."""
    plan: Plan | None
    """None where nothing fits."""
    note: str = ""

    @property
    def samples_per_gpu_s(self) -> float:
        """Of the GPUs there are, seats or not."""
        return math.nan if self.plan is None else self.num_samples / self.plan.predicted_step_s / self.num_gpus


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything `dflop plan --explain` tells."""

    plans: tuple[Plan, ...]
    """Best first."""
    costs: tuple[tuple[str, str], ...]
    """(module with its degree, where its cost table comes from)."""
    stages: tuple[StageUse, ...]
    time: TimeUse
    limits: tuple[Limit, ...]
    """Nearest to their ends first."""
    variations: tuple[Variation, ...]
    """The first is the plan itself."""


def paragraph(found: Explanation) -> str:
    """Why this plan, in plain words."""
    plan, time = found.plans[0], found.time
    sentences = [plan.reason[:1].upper() + plan.reason[1:]]
    idle = f"GPUs compute {units.percent(time.busy_frac)} of the step and wait {units.percent(time.idle_frac)} of it"
    if not math.isnan(time.even_idle_frac):
        idle += f" ({units.percent(time.even_idle_frac)} if all microbatches were alike)"
    idle += f"; gradients and optimizer take {units.percent(time.sync_frac)}"
    sentences.append(idle + (f"; {units.percent(time.unused_frac)} has no seat." if time.unused_frac > 0 else "."))
    busiest = max(found.stages, key=lambda s: s.busy_s)
    own = units.percent(busiest.busy_s / (busiest.busy_s + busiest.idle_s + plan.sync_s))
    sentences.append(f"The busiest stage, {busiest.stage}, computes {own} of the step.")
    binding = [limit.name for limit in found.limits if limit.is_binding]
    sentences.append(f"At or near its end: {', '.join(binding)}." if binding else "No limit is near its end.")
    return " ".join(sentences)


def explanation_tables(found: Explanation) -> tuple[Table, ...]:
    """The explanation for people."""
    return _candidates(found), _limits(found), _stages(found), _variations(found)


def print_explanation(found: Explanation, source: str, console: Console) -> None:
    """Prints the tables and the paragraph.

    Args:
        found: What to print.
        source: Of the costs.
        console: Where to.
    """
    if not console.is_terminal:
        console.width = NO_EDGE  # of a log or a pager
    for table in explanation_tables(found):
        print_table(table, console)
    console.print()
    console.print(Text(paragraph(found)), soft_wrap=not console.is_terminal)
    costs = ", ".join(f"{what} {origin}" for what, origin in found.costs)
    console.print(Text(f"Simulated; costs {source} ({costs}).", style="dim"), soft_wrap=not console.is_terminal)


def explanation_json(found: Explanation, source: str) -> str:
    """The explanation as one JSON object, numbers in full; what is not known is null."""
    base = found.variations[0].samples_per_gpu_s
    content = {
        "simulated": True,
        "source": source,
        "costs": dict(found.costs),
        "paragraph": paragraph(found),
        "plans": [to_dict(plan) for plan in found.plans],
        "limits": [{**dataclasses.asdict(x), "is_binding": x.is_binding} for x in found.limits],
        "time": dataclasses.asdict(found.time),
        "stages": [dataclasses.asdict(stage) for stage in found.stages],
        "variations": [
            {
                "name": v.name,
                "num_gpus": v.num_gpus,
                "num_samples": v.num_samples,
                "layout": v.plan and layout_text(v.plan),
                "num_microbatches": v.plan and v.plan.num_microbatches,
                "step_s": v.plan and v.plan.predicted_step_s,
                "samples_per_gpu_s": v.samples_per_gpu_s,
                "relative": v.samples_per_gpu_s / base,
                "note": v.note,
            }
            for v in found.variations
        ],
    }
    return json.dumps(_without_nan(content), allow_nan=False)


def _candidates(found: Explanation) -> Table:
    usable_bytes = found.stages[0].usable_bytes
    shown = found.plans[:MAX_CANDIDATES]
    more = len(found.plans) - len(shown)
    return Table(
        "Candidates, simulated",
        ("rank", "layout", "layers", "micro-batches", "step", "peak memory", "over data-blind", "over uniform"),
        tuple(
            (
                str(p.candidate_rank),
                layout_text(p),
                layers_text(p),
                str(p.num_microbatches),
                units.seconds(p.predicted_step_s),
                _memory(max(b for m in p.modules for b in m.stage_memory_bytes), usable_bytes),
                units.ratio(p.planned_speedup),
                units.ratio(p.planned_speedup_over_uniform),
            )
            for p in shown
        ),
        frozenset({"layout", "layers"}),
        "Over data-blind: the same layout in arrival order. Over uniform: the best data-blind plan with one layout for "
        "the whole model. Memory of the fullest stage, with its share of the usable." + f" {more} more." * (more > 0),
    )


def layers_text(plan: Plan) -> str:
    """`vision 26, llm 10-10-8`: layers per stage."""
    return ", ".join(f"{m.module} {'-'.join(map(str, m.layers_per_stage))}" for m in plan.modules)


def _limits(found: Explanation) -> Table:
    return Table(
        "What limits the plan",
        ("limit", "used", "", "in numbers"),
        tuple((x.name, units.percent(x.used_frac), "binding" * x.is_binding, x.text) for x in found.limits),
        frozenset({"limit", "", "in numbers"}),
        f"Binding: from {units.percent(BINDING_FRAC)} on. What more memory is worth stands below.",
    )


def _stages(found: Explanation) -> Table:
    step_s = found.plans[0].predicted_step_s
    return Table(
        "Where the step goes, simulated",
        ("stage", "layers", "GPUs", "busy", "busy share", "idle", "idle share", "peak memory"),
        tuple(
            (
                s.stage,
                s.layers,
                str(s.num_gpus),
                units.seconds(s.busy_s),
                units.percent(s.busy_s / step_s),
                units.seconds(s.idle_s),
                units.percent(s.idle_s / step_s),
                _memory(s.memory_bytes, s.usable_bytes),
            )
            for s in found.stages
        ),
        frozenset({"stage", "layers"}),
        f"Means over replicas and sampled batches, of a step of {units.seconds(step_s)}, of which gradient "
        f"synchronisation and optimizer take {units.seconds(found.plans[0].sync_s)}.",
    )


def _variations(found: Explanation) -> Table:
    base = found.variations[0]

    def row(v: Variation) -> tuple[str, ...]:
        if v.plan is None:
            return v.name, str(v.num_gpus), f"{v.num_samples:g}", "-", "-", "-", "-", v.note
        return (
            v.name,
            str(v.num_gpus),
            f"{v.num_samples:g}",
            layout_text(v.plan),
            str(v.plan.num_microbatches),
            units.seconds(v.plan.predicted_step_s),
            units.ratio(v.samples_per_gpu_s / base.samples_per_gpu_s),
            v.note,
        )

    return Table(
        "Other circumstances, planned anew and simulated",
        ("", "GPUs", "samples", "layout", "micro-batches", "step", "per GPU", "note"),
        tuple(row(v) for v in found.variations),
        frozenset({"", "layout", "note"}),
        "Per GPU: samples per second and GPU, over those of the plan.",
    )


def _memory(num_bytes: int, usable_bytes: int) -> str:
    return f"{units.num_bytes(num_bytes)} ({num_bytes / usable_bytes:.0%})"


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    return [_without_nan(v) for v in value] if isinstance(value, list | tuple) else value
