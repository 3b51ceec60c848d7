"""What sampled global batches demand of each module: totals for throughput, longest units for fill, caps for memory.

A unit is what cannot be divided between microbatches or ranks: a media item of an encoder with ranks of its own, else
a sample with all its items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflop.cost.model import Floats
from dflop.records import LLM, SampleShape
from dflop.schedule.items import Ints, module_items
from dflop.schedule.pack import TOKEN_CAP_RATIO, token_cap


@dataclass(frozen=True, slots=True)
class ScenarioLoads:
    """One module's load in S sampled global batches. Rows of the arrays: items, tokens, sum of squared tokens."""

    module: str
    total: Floats
    """`[3, S]` over the whole global batch."""
    longest: Floats
    """`[3, S]` of the largest single unit, each row on its own."""
    num_units: Ints
    """`[S]`."""
    units: tuple[Ints, ...]
    """Per scenario `[3, units]`, in arrival order."""
    lengths: tuple[Ints, ...]
    """Per scenario the tokens of every unit, descending."""
    worst: ScenarioLoads | None = None
    """In batches with the largest samples there are, which memory has to hold; None: no larger ones than in these."""
    _caps: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def per_microbatch(self, num_buckets: npt.ArrayLike) -> Floats:
        """`[3, ..., S]`: load of an average bucket, but of no less than an average unit, since units do not split.

        Args:
            num_buckets: `[...]`.
        """
        buckets = np.asarray(num_buckets)[..., np.newaxis]
        shares = np.maximum(np.minimum(self.num_units, buckets), 1)
        total = self.total.reshape(3, *(1,) * (shares.ndim - 1), -1)
        average: Floats = total / shares
        return average

    def typical(self, num_buckets: npt.ArrayLike) -> Floats:
        """`[3, ...]`: mean over scenarios of the average bucket."""
        mean: Floats = np.ceil(self.per_microbatch(num_buckets).mean(axis=-1))
        return mean

    def largest(self, num_buckets: npt.ArrayLike) -> Floats:
        """`[3, ...]`: largest bucket the scheduler may build in any scenario or of `worst`, in whole items and tokens.

        LLM tokens are those of its token cap, and their squares those of the longest sample over and over.
        """
        buckets = np.asarray(num_buckets)
        total = self.total.reshape(3, *(1,) * buckets.ndim, -1)
        longest = self.longest.reshape(3, *(1,) * buckets.ndim, -1)
        found: Floats = np.maximum(TOKEN_CAP_RATIO * total / buckets[..., np.newaxis], longest).max(axis=-1)
        if self.module == LLM:
            found[1] = np.vectorize(self._token_cap, otypes=[float])(buckets)
            found[2] = found[1] * max((int(tokens[0]) for tokens in self.lengths if len(tokens)), default=0)
        found = np.ceil(found)
        return found if self.worst is None else np.maximum(found, self.worst.largest(num_buckets))

    def _token_cap(self, num_buckets: int) -> int:
        """The scheduler's cap in the scenario where it is highest."""
        if num_buckets not in self._caps:
            self._caps[num_buckets] = max(token_cap(tokens, num_buckets) for tokens in self.lengths)
        return self._caps[num_buckets]


def scenario_loads(
    batches: Sequence[Sequence[SampleShape]],
    module: str,
    *,
    whole_samples: bool = False,
    worst: Sequence[Sequence[SampleShape]] = (),
) -> ScenarioLoads:
    """Loads of `module` in each of `batches`, and of those in `worst` that memory alone has to hold.

    With `whole_samples` an encoder's items stay with their sample.
    """
    units: list[Ints] = []
    for batch in batches:
        items = module_items(batch, module)
        parts = [items.num_items, items.num_tokens, items.sum_sq_tokens]
        if whole_samples:
            sample = np.array(items.sample, dtype=np.int64)
            parts = [np.bincount(sample, part, len(batch)).astype(np.int64) for part in parts]
        units.append(np.stack(parts))
    return ScenarioLoads(
        module=module,
        total=np.stack([of.sum(axis=1) for of in units], axis=1).astype(float),
        longest=np.stack([of.max(axis=1, initial=0) for of in units], axis=1).astype(float),
        num_units=np.array([of.shape[1] for of in units], dtype=np.int64),
        units=tuple(units),
        lengths=tuple(np.sort(of[1])[::-1].copy() for of in units),
        worst=scenario_loads(worst, module, whole_samples=whole_samples) if worst else None,
    )
