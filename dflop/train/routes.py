"""What travels between ranks, computed alike at both ends: from the plan, and which rows from the StepPlan.

Route(source, target) = the items both own, in the source's packed order. Because either end derives it from the
StepPlan, messages carry no header, need no handshake, and are not sent at all when empty. Pure Python; the property
that matters (every row sent once and received once) is tested without any process.

Only the LLM is cut into stages: its hidden states cross the boundaries between them. Rows of encoders on its ranks may
cross boundaries, too, on their way to the stage where the LLM begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflop.parallel.topology import Seat
from dflop.records import LLM, Plan, StepPlan

Trains = Mapping[tuple[str, int], bool]
"""Whether a module has parameters that train on a stage of its grid."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor that crosses a boundary in every microbatch that has work for its module."""

    module: str
    """The LLM, whose hidden states cross, or an encoder, whose rows do."""
    needs_grad: bool
    """Whether anything that trains is behind it."""


def crossings(plan: Plan, seat: Seat, stage: int, trains: Trains) -> tuple[Crossing, ...]:
    """What crosses into `stage` of the seat's grid from the stage before, in the order in which it is sent.

    Args:
        plan: The layout.
        seat: Any seat of the grid.
        stage: From 0 (nothing crosses) to the number of stages (likewise).
        trains: Of all modules and stages; what is missing does not train.
    """
    modules = plan.grid_of(seat.module)
    if not 0 < stage < modules[-1].parallel.pp:
        return ()
    llm_begins = next(s for s, n in enumerate(plan.module(LLM).layers_per_stage) if n)
    found = []
    for module in modules:
        done, left = sum(module.layers_per_stage[:stage]), sum(module.layers_per_stage[stage:])
        if done and (left or (module.module != LLM and stage <= llm_begins)):
            found.append(Crossing(module.module, needs_grad(plan, module.module, stage, trains)))
    return tuple(found)


def needs_grad(plan: Plan, module: str, stage: int, trains: Trains) -> bool:
    """Whether anything trains behind a module's tensor that leaves the stages before `stage`."""
    if any(trains.get((module, s), False) for s in range(stage)):
        return True
    return module == LLM and any(
        needs_grad(plan, encoder.module, encoder.parallel.pp, trains) for encoder in plan.encoders
    )


@dataclass(frozen=True, slots=True)
class Route:
    """Items that go from one encoder replica to one LLM replica in one microbatch."""

    encoder_dp: int
    llm_dp: int
    items: tuple[int, ...]
    """Item ids of the encoder's `ModuleWork`, in the encoder's packed order."""
    source_rows: tuple[tuple[int, int], ...]
    """Per item, `[start, end)` in the encoder replica's packed output."""

    @property
    def num_rows(self) -> int:
        return sum(end - start for start, end in self.source_rows)


def routes(step_plan: StepPlan, encoder: str, microbatch: int) -> tuple[Route, ...]:
    """Every non-empty route of `encoder` in a microbatch, ordered by (encoder replica, LLM replica)."""
    work, llm = step_plan.of(encoder), step_plan.of(LLM)
    llm_of_sample = {llm.item_sample[item]: dp for dp, items in enumerate(llm.owner[microbatch]) for item in items}
    found: list[Route] = []
    for encoder_dp, items in enumerate(work.owner[microbatch]):
        picked: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        start = 0
        for item in items:
            end = start + work.item_rows[item]
            picked.setdefault(llm_of_sample[work.item_sample[item]], []).append((item, (start, end)))
            start = end
        for llm_dp in sorted(picked):
            pairs = picked[llm_dp]
            found.append(Route(encoder_dp, llm_dp, tuple(i for i, _ in pairs), tuple(r for _, r in pairs)))
    return tuple(found)
