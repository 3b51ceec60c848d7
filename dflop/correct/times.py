"""What is learnt from: seconds of microbatches and what was predicted for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.cost.curve import Bools, Floats
from dflop.simulate.step import Node

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """All microbatches of a step, each on one stage of one data-parallel rank, as arrays of n rows."""

    nodes: tuple[Node, ...]
    node: Ints
    """`[n]` positions in `nodes`."""
    measured_s: Floats
    """`[n]`."""
    expected_s: Mapping[str, Floats]
    """Uncorrected prediction, per module `[n, buckets]`; zeros where it has no work."""

    def rows(self, chosen: Bools) -> StepTimes:
        """Some of the rows."""
        expected_s = {module: seconds[chosen] for module, seconds in self.expected_s.items()}
        return StepTimes(self.nodes, self.node[chosen], self.measured_s[chosen], expected_s)

    def table(self, widths: Mapping[str, int]) -> Floats:
        """`[n, sum of widths]` predicted seconds of some modules side by side."""
        num = len(self.node)
        return np.hstack([self.expected_s.get(m, np.zeros((num, width))) for m, width in widths.items()])


def sums(rows: Floats, group: Ints, num: int) -> Floats:
    """`[num, K]` sum of the rows of each group; zeros of one without any.

    Column by column, for numpy adds up a column by groups much faster than it scatters rows.

    Args:
        rows: `[n, K]`.
        group: `[n]`, 0..num - 1.
        num: Groups.
    """
    found: Floats = np.stack([np.bincount(group, column, num) for column in rows.T], axis=1)
    return found


def medians(values: Floats, group: Ints, num: int) -> Floats:
    """`[num]` median of the values of each group; NaN of one without any.

    All at once, for a call of numpy's own for every rank adds up.

    Args:
        values: `[n]`.
        group: `[n]`, 0..num - 1.
        num: Groups.
    """
    ascending = values[np.lexsort((values, group))]
    count = np.bincount(group, minlength=num)
    first = np.cumsum(count) - count
    found = np.full(num, np.nan)
    some = count > 0
    low, high = (first + (count - 1) // 2)[some], (first + count // 2)[some]
    found[some] = 0.5 * (ascending[low] + ascending[high])
    return found
