"""What is learnt from: seconds of microbatches beside what was predicted for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.cost.curve import Bools, Floats
from dflop.simulate.step import Node

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch on one stage of one data-parallel rank."""

    node: Node
    measured_s: float
    expected_s: Mapping[str, Floats]
    """Uncorrected prediction per module that has work in it, `[buckets]`."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The same of all microbatches of a step, as arrays of n rows, for there may be thousands of them."""

    nodes: tuple[Node, ...]
    node: Ints
    """`[n]` positions in `nodes`."""
    measured_s: Floats
    """`[n]`."""
    expected_s: Mapping[str, Floats]
    """Per module `[n, buckets]`; zeros where it has no work."""

    @staticmethod
    def of(times: Iterable[StageTime]) -> StepTimes:
        """Rows from one value each."""
        found = list(times)
        nodes = tuple(dict.fromkeys(time.node for time in found))
        widths = {module: len(seconds) for time in found for module, seconds in time.expected_s.items()}
        return StepTimes(
            nodes,
            np.array([nodes.index(time.node) for time in found], dtype=np.int64),
            np.array([time.measured_s for time in found], dtype=np.float64),
            {
                module: np.array([time.expected_s.get(module, np.zeros(width)) for time in found])
                for module, width in widths.items()
            },
        )

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
