"""Why a plan is the plan: where its step goes, what limits it, and what other circumstances would do. All simulated."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from dflop import __version__, units
from dflop.cost.terms import Term
from dflop.plan.limits import BINDING_FRAC, Limit
from dflop.records import Plan, to_dict
from dflop.report.html_page import GLOSSARY, Drawing, Page, Section
from dflop.report.plots import Picture
from dflop.report.rows import json_text
from dflop.report.table_text import print_table
from dflop.report.tables import Table, layout_text, make_table
from dflop.report.terms_table import terms_table

MAX_CANDIDATES = 8
"""Plans shown to people; programs get all."""
NO_EDGE = 1000


@dataclass(frozen=True, slots=True)
class StageUse:
    """One stage of the plan; seconds are means over its data-parallel ranks and the sampled batches."""

    stage: str
    """`vision pp0`; in a colocated plan `stage 0`."""
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
    """Share of processes without a rank in the plan."""
    even_idle_frac: float
    """Idle time if all microbatches were equal: the rest of the pipeline's own. NaN where processes share cores."""


@dataclass(frozen=True, slots=True)
class Variation:
    """The best plan under other circumstances."""

    name: str
    num_gpus: int
    num_samples: float
    """Samples of a global batch."""
    plan: Plan | None
    """None where nothing fits."""
    note: str = ""

    @property
    def samples_per_gpu_s(self) -> float:
        """Samples per second and GPU, GPUs without a rank included."""
        return math.nan if self.plan is None else self.num_samples / self.plan.predicted_step_s / self.num_gpus


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything `dflop plan --explain` tells."""

    plans: tuple[Plan, ...]
    """Best first."""
    costs: tuple[tuple[str, str], ...]
    """(module with its degree, where its cost table comes from)."""
    terms: tuple[Term, ...]
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
        idle += f" ({units.percent(time.even_idle_frac)} if all microbatches were equal)"
    idle += f"; gradients and optimizer take {units.percent(time.sync_frac)}"
    sentences.append(
        idle + (f"; {units.percent(time.unused_frac)} of the GPUs are unused." if time.unused_frac > 0 else ".")
    )
    busiest = max(found.stages, key=lambda s: s.busy_s)
    own = units.percent(busiest.busy_s / (busiest.busy_s + busiest.idle_s + plan.sync_s))
    sentences.append(f"The busiest stage, {busiest.stage}, computes {own} of the step.")
    binding = [limit.name for limit in found.limits if limit.is_binding]
    sentences.append(f"At or near the limit: {', '.join(binding)}." if binding else "No limit is close.")
    return " ".join(sentences)


def explanation_tables(found: Explanation) -> tuple[Table, ...]:
    """The explanation for people."""
    return _candidates(found), _limits(found), _stages(found), _variations(found), terms_table(found.terms)


def print_explanation(found: Explanation, source: str, console: Console) -> None:
    """Prints the tables and the paragraph; `source` is that of the costs."""
    if not console.is_terminal:
        console.width = NO_EDGE  # of a log or a pager
    for table in explanation_tables(found):
        print_table(table, console)
    console.print()
    console.print(Text(paragraph(found)), soft_wrap=not console.is_terminal)
    costs = ", ".join(f"{what} {origin}" for what, origin in found.costs)
    console.print(Text(f"Simulated; costs {source} ({costs}).", style="dim"), soft_wrap=not console.is_terminal)


def explanation_page(
    found: Explanation, source: str, command: str, numbers: tuple[tuple[str, str, str], ...], steps: Picture
) -> Page:
    """The explanation as a page: sentence, picture, candidates, limits, stages, what-if.

    Args:
        found: What is explained.
        source: Of the costs.
        command: That makes the page again.
        numbers: (label, value, remark) besides those of the plan.
        steps: One global batch in arrival order and balanced.
    """
    plan, kinds = found.plans[0], ("simulated",)
    candidates, limits, stages, variations, terms = explanation_tables(found)
    facts = (
        ("command", command),
        ("costs", ", ".join(f"{what} {origin}" for what, origin in found.costs)),
        ("plan", plan.plan_id),
        ("dflop", __version__),
    )
    return Page(
        title=f"A plan: {layout_text(plan)}",
        subtitle=f"{found.variations[0].num_gpus} devices, costs {source}.",
        kinds=kinds,
        verdict=paragraph(found),
        numbers=(
            ("step", units.seconds(plan.predicted_step_s), f"{plan.num_microbatches} microbatches"),
            ("speedup over arrival order", units.ratio(plan.planned_speedup), "same layout, unbalanced batches"),
            ("over the best uniform plan", units.ratio(plan.planned_speedup_over_uniform), "in arrival order"),
            *numbers,
        ),
        sections=(
            Section("step", "One global batch", kinds, drawings=(Drawing(steps.svg(), f"{steps.label}.", (), True),)),
            Section("candidates", candidates.title, tables=(candidates,)),
            Section("limits", limits.title, tables=(limits,)),
            Section("stages", stages.title, tables=(stages,)),
            Section("variations", variations.title, tables=(variations,)),
            Section("terms", terms.title, tables=(terms,)),
            Section("how", "How to read this", notes=(GLOSSARY,)),
            Section("reproduce", "To reproduce", facts=facts),
        ),
    )


def explanation_json(found: Explanation, source: str) -> str:
    """The explanation as one JSON object, numbers in full; what is not known is null."""
    base = found.variations[0].samples_per_gpu_s
    content = dataclasses.asdict(found) | {
        "simulated": True,
        "source": source,
        "costs": dict(found.costs),
        "paragraph": paragraph(found),
        "plans": [to_dict(plan) for plan in found.plans],
        "limits": [{**dataclasses.asdict(x), "is_binding": x.is_binding} for x in found.limits],
        "variations": [
            {
                **{key: getattr(v, key) for key in ("name", "num_gpus", "num_samples", "samples_per_gpu_s", "note")},
                "layout": v.plan and layout_text(v.plan),
                "num_microbatches": v.plan and v.plan.num_microbatches,
                "step_s": v.plan and v.plan.predicted_step_s,
                "relative": v.samples_per_gpu_s / base,
            }
            for v in found.variations
        ],
    }
    return json_text(content)


def _candidates(found: Explanation) -> Table:
    usable_bytes, more = found.stages[0].usable_bytes, len(found.plans) - MAX_CANDIDATES
    return make_table(
        "Candidates, simulated",
        found.plans[:MAX_CANDIDATES],
        {
            "rank": lambda p: str(p.candidate_rank),
            "layout": lambda p: layout_text(p, found.variations[0].num_gpus),
            "layers": lambda p: ", ".join(f"{m.module} {'-'.join(map(str, m.layers_per_stage))}" for m in p.modules),
            "micro-batches": lambda p: str(p.num_microbatches),
            "step": lambda p: units.seconds(p.predicted_step_s),
            "peak memory": lambda p: _memory(max(b for m in p.modules for b in m.stage_memory_bytes), usable_bytes),
            "over arrival order": lambda p: units.ratio(p.planned_speedup),
            "over uniform": lambda p: units.ratio(p.planned_speedup_over_uniform),
        },
        text={"layout", "layers"},
        note=(
            "Over arrival order: the same layout, unbalanced. Over uniform: the best plan with one layout for the "
            "whole model, in arrival order. Memory of the fullest stage, with its share of usable memory."
        )
        + f" {more} more." * (more > 0),
    )


def _limits(found: Explanation) -> Table:
    return make_table(
        "What limits the plan",
        found.limits,
        {
            "limit": lambda x: x.name,
            "used": lambda x: units.percent(x.used_frac),
            "": lambda x: "binding" * x.is_binding,
            "in numbers": lambda x: x.text,
        },
        text={"limit", "", "in numbers"},
        note=f"Marked: from {units.percent(BINDING_FRAC)} of the limit on. The value of more memory is shown below.",
    )


def _stages(found: Explanation) -> Table:
    step_s, sync_s = found.plans[0].predicted_step_s, found.plans[0].sync_s
    return make_table(
        "Where the step goes, simulated",
        found.stages,
        {
            "stage": lambda s: s.stage,
            "layers": lambda s: s.layers,
            "GPUs": lambda s: str(s.num_gpus),
            "busy": lambda s: units.seconds(s.busy_s),
            "busy share": lambda s: units.percent(s.busy_s / step_s),
            "idle": lambda s: units.seconds(s.idle_s),
            "idle share": lambda s: units.percent(s.idle_s / step_s),
            "peak memory": lambda s: _memory(s.memory_bytes, s.usable_bytes),
        },
        text={"stage", "layers"},
        note=(
            f"Means over replicas and sampled batches, of a step of {units.seconds(step_s)}, of which gradient "
            f"synchronization and optimizer take {units.seconds(sync_s)}."
        ),
    )


def _variations(found: Explanation) -> Table:
    base = found.variations[0]
    return make_table(
        "What-if analysis: replanned and simulated",
        found.variations,
        {
            "": lambda v: v.name,
            "GPUs": lambda v: str(v.num_gpus),
            "samples": lambda v: f"{v.num_samples:g}",
            "layout": lambda v: layout_text(v.plan, v.num_gpus) if v.plan else "-",
            "micro-batches": lambda v: str(v.plan.num_microbatches) if v.plan else "-",
            "step": lambda v: units.seconds(v.plan.predicted_step_s) if v.plan else "-",
            "per GPU": lambda v: units.ratio(v.samples_per_gpu_s / base.samples_per_gpu_s),
            "note": lambda v: v.note,
        },
        text={"", "layout", "note"},
        note="Per GPU: samples per second and GPU, over those of the plan.",
    )


def _memory(num_bytes: int, usable_bytes: int) -> str:
    return f"{units.num_bytes(num_bytes)} ({num_bytes / usable_bytes:.0%})"
