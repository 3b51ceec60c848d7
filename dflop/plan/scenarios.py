"""What sampled global batches demand of each module: totals for throughput, longest items for fill, caps for memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM, ModuleLoad, SampleShape
from dflop.schedule.items import module_items
from dflop.schedule.pack import TOKEN_CAP_RATIO, token_cap


@dataclass(frozen=True, slots=True)
class ScenarioLoads:
    """One module's load in S sampled global batches. Rows of the arrays: items, tokens, sum of squared tokens."""

    module: str
    total: Floats
    """`[3, S]` over the whole global batch."""
    longest: Floats
    """`[3, S]` of the largest single item."""
    lengths: tuple[tuple[int, ...], ...]
    """Per scenario the tokens of every item."""

    def per_microbatch(self, num_buckets: int) -> Floats:
        """`[3, S]`: load of an average bucket, but of no less than an average item, since items do not split."""
        average: Floats = self.total / np.clip([len(lengths) for lengths in self.lengths], 1.0, num_buckets)
        return average

    def typical(self, num_buckets: int) -> ModuleLoad:
        """Mean over scenarios of the average bucket."""
        return ModuleLoad(*(math.ceil(part) for part in self.per_microbatch(num_buckets).mean(axis=1)))

    def largest(self, num_buckets: int) -> ModuleLoad:
        """Largest bucket the scheduler should build in any scenario.

        LLM tokens are capped by the scheduler and their squares by the longest sample; an encoder has no cap of its
        own, so its bucket is an estimate that the planner checks against the schedules it simulates.
        """
        items, tokens, sum_sq = np.maximum(TOKEN_CAP_RATIO * self.total / num_buckets, self.longest).max(axis=1)
        if self.module == LLM:
            tokens = max(token_cap(np.array(lengths, dtype=np.int64), num_buckets) for lengths in self.lengths)
            sum_sq = tokens * max((n for lengths in self.lengths for n in lengths), default=0)
        return ModuleLoad(math.ceil(items), math.ceil(tokens), math.ceil(sum_sq))


def scenario_loads(batches: Sequence[Sequence[SampleShape]], module: str) -> ScenarioLoads:
    """Loads of `module` in each of `batches`."""
    total, longest, lengths = [], [], []
    for batch in batches:
        items = module_items(batch, module)
        parts = (items.num_items, items.num_tokens, items.sum_sq_tokens)
        total.append([part.sum() for part in parts])
        longest.append([part.max(initial=0) for part in parts])
        lengths.append(tuple(items.num_tokens.tolist()))
    return ScenarioLoads(module, np.array(total, dtype=float).T, np.array(longest, dtype=float).T, tuple(lengths))
