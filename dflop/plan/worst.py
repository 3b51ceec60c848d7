"""The largest samples of a data profile under a plan: drawn batches hardly ever hold them, memory must.

A search is held to them (`Problem.worst_samples`). Where nothing holds them all, a plan for the drawn batches is the
best there is, and it says which sample goes beyond it, by how much, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflop import units
from dflop.plan.drafts import charged, fits, holding
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, SampleShape

MAX_NAMED = 3
"""Samples that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """A sample that a plan has no room for."""

    sample: SampleShape
    module: str
    """Whose tokens exceed their cap most; the LLM where only other things do."""
    num_tokens: int
    """It brings to the module, those of its largest item where items can be divided."""
    max_tokens: int
    """A microbatch of one group may have."""
    need_bytes: int
    """Bytes of the fullest stage with the sample in a microbatch."""

    def __str__(self) -> str:
        over = f", where a microbatch holds {units.count(self.max_tokens)}" * (0 < self.max_tokens < self.num_tokens)
        return (
            f"sample `{self.sample.sample_id}` with {units.count(self.num_tokens)} tokens in `{self.module}`{over}, "
            f"needs {units.num_bytes(self.need_bytes)}"
        )


def samples_beyond(problem: Problem, plan: Plan) -> tuple[Beyond, ...]:
    """Samples of which one in a batch takes more memory than a plan has, those that need most first.

    Args:
        problem: With the largest samples of its data.
        plan: That fits without them, made for these or other batches.
    """
    if fits(problem, charged(problem, plan)):
        return ()
    found = []
    for sample in problem.worst_samples:
        alone = charged(replace(problem, worst_samples=(sample,)), plan)
        if not fits(problem, alone):
            found.append(_beyond(sample, plan, max(b for m in alone.modules for b in m.stage_memory_bytes)))
    return tuple(sorted(found, key=lambda b: -b.need_bytes))


def without_beyond(problem: Problem, plan: Plan) -> Problem:
    """The problem without its largest samples where its best plan does not hold them, as then no plan does."""
    return problem if holding(problem, plan) is not None else replace(problem, worst_samples=())


def beyond_text(problem: Problem, beyond: Sequence[Beyond]) -> str:
    """Which samples go beyond a plan, and what to do about it; empty where none does."""
    if not beyond:
        return ""
    named = "; ".join(map(str, beyond[:MAX_NAMED]))
    more = f"; {len(beyond) - MAX_NAMED} more" if len(beyond) > MAX_NAMED else ""
    return (
        f"Not every sample fits: {named}{more}, of {units.num_bytes(problem.usable_bytes)} usable. A step with one of "
        "them may run out of memory: lower dataset.max_llm_tokens (with dataset.overlong to shorten what is longer), "
        "remove the sample, or plan for more memory."
    )


def _beyond(sample: SampleShape, plan: Plan, need_bytes: int) -> Beyond:
    tokens = {m.module: _tokens(sample, m.module, whole=plan.follows_samples(m.module)) for m in plan.modules}
    capped = [m for m in plan.modules if m.max_tokens and tokens[m.module] > m.max_tokens]
    most = max(capped, key=lambda m: tokens[m.module] / m.max_tokens, default=plan.module(LLM))
    return Beyond(sample, most.module, tokens[most.module], most.max_tokens, need_bytes)


def _tokens(sample: SampleShape, module: str, *, whole: bool) -> int:
    if module == LLM or whole:
        return sample.load(module).num_tokens
    return max((item.num_tokens for item in sample.items if item.module == module), default=0)
