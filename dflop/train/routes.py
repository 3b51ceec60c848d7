"""Which rows travel between an encoder's owners and the LLM's owners, computed alike at both ends.

Route(source, target) = the items both own, in the source's packed order. Because either end derives it from the
StepPlan, messages carry no header, need no handshake, and are not sent at all when empty. Pure Python; the property
that matters (every row sent once and received once) is tested without any process.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflop.records import LLM, StepPlan


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
