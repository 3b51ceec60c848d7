"""The same model, data and GPUs at several global batch sizes: at which a token takes the fewest GPU-hours.

What is compared is speed alone. A larger batch takes fewer updates for an epoch, and what that does to the loss is not
known here; so the smallest batch that is nearly as fast is named, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflop import units
from dflop.compare.outlook import Outlook
from dflop.cost.throughput import Throughput
from dflop.errors import InfeasiblePlanError
from dflop.records import Plan
from dflop.report.tables import Table, layout_text, make_table
from dflop.run.messages import Say

T = TypeVar("T")
_NEARLY_FRAC = 0.05


@dataclass(frozen=True, slots=True)
class AtBatch(Generic[T]):
    """What was found at a global batch size."""

    outlook: Outlook
    found: T
    plan: Plan
    step_s: float
    speed: Throughput

    @property
    def num_samples(self) -> int:
        return self.outlook.problem.global_batch_size


def at_batches(
    outlook: Outlook, sizes: Sequence[int], look: Callable[[Outlook], AtBatch[T]], say: Say
) -> list[AtBatch[T]]:
    """What `look` finds at each global batch size, the fastest per token first; without sizes at the configured one.

    Raises:
        InfeasiblePlanError: nothing fits in memory at any size.
    """
    if not sizes:
        return [look(outlook)]
    found: list[AtBatch[T]] = []
    for number, size in enumerate(sizes, 1):
        if len(sizes) > 1:
            say(f"global batch {number} of {len(sizes)}: {size} samples")
        try:
            found.append(look(outlook.at(size)))
        except InfeasiblePlanError as error:
            if number == len(sizes) and not found:
                raise
            say(f"no plan at a global batch of {size}: {error.what}")
    return sorted(found, key=lambda at: -at.speed.tokens_per_s_per_gpu)


def batch_table(found: Sequence[AtBatch[T]]) -> Table:
    """A row per global batch size, the fastest per token first."""
    return make_table(
        "Global batch sizes, fastest per token first",
        found,
        {
            "global batch": lambda at: str(at.num_samples),
            "layout": lambda at: layout_text(at.plan, at.outlook.workload.num_gpus),
            "step simulated": lambda at: units.seconds(at.step_s),
            "tokens/s/GPU": lambda at: f"{at.speed.tokens_per_s_per_gpu:,.0f}",
            "MFU": lambda at: units.percent(at.speed.mfu_frac),
            "GPU-h/1e9 tokens": lambda at: f"{1e9 / at.speed.tokens_per_s_per_gpu / 3600:,.1f}",
        },
        text={"layout"},
    )


def batch_verdict(found: Sequence[AtBatch[T]]) -> str:
    """Which global batch takes the fewest GPU-hours, and the smallest that takes hardly more."""
    best, *others = found
    speed = best.speed.tokens_per_s_per_gpu
    if not others:
        return f"a global batch of {best.num_samples} is the only one with a plan that fits in memory"
    ratios = ", ".join(f"{units.ratio(speed / x.speed.tokens_per_s_per_gpu)} that of {x.num_samples}" for x in others)
    nearly = [x for x in found if x.speed.tokens_per_s_per_gpu >= (1 - _NEARLY_FRAC) * speed]
    smallest = min(nearly, key=lambda at: at.num_samples)
    text = f"simulated: a global batch of {best.num_samples} takes the fewest GPU-hours per token, its speed {ratios}"
    if smallest.num_samples < best.num_samples:
        text += f"; {smallest.num_samples} is the smallest within {_NEARLY_FRAC:.0%} of it"
    text += ". Speed alone: what the batch size does to the loss is not known here"
    return f"{text}. What follows is for {best.num_samples}."
