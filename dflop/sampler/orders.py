"""The order in which samples come: dflop's own random one, as it is or with similar samples gathered in windows.

A window of W global batches holds the same samples as W random ones. They are sorted by size and cut into pieces, and
each batch gets one piece of every size range, so that microbatches need hardly any padding and ranks hardly wait, even
where a random global batch is too small for that. What it costs: samples of a step have similar lengths by design, as
under `group_by_length`; with several microbatches less so, since a batch then has pieces of several ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflop.cost.model import Floats
from dflop.data.sample_order import SampleOrder
from dflop.errors import ConfigError
from dflop.sampler.costs_of_samples import Ints, SampleCosts


@dataclass(frozen=True, slots=True)
class Cut:
    """How the order of an epoch becomes global batches."""

    global_batch_size: int
    window: int = 1
    """Global batches whose samples are sorted together; 1: none are."""
    num_pieces: int = 1
    """Of different size ranges in a global batch of a window."""


class Order(Protocol):
    """Rows of `SampleCosts`, epoch by epoch."""

    num_drawn: int
    """In every epoch."""

    def epoch(self, epoch: int, cut: Cut) -> Ints:
        """`[num_drawn]` rows, one global batch after the other."""


class RandomOrder:
    """A permutation per epoch, a function of the seed and the epoch."""

    def __init__(self, seed: int, costs: SampleCosts, sizes: Floats | Ints) -> None:
        self.num_drawn = len(costs)
        self._seed, self._sizes, self._weights = seed, sizes, costs.weights

    def epoch(self, epoch: int, cut: Cut) -> Ints:
        """As `Order` says.

        Raises:
            ConfigError: a window over samples that come several times.
        """
        drawn = SampleOrder(self._seed, self.num_drawn, cut.global_batch_size, self._weights).epoch(epoch)
        if cut.window == 1:
            return drawn
        if self._weights is not None:
            raise ConfigError("a window does not go with weights: a sample's repetitions would meet in one batch")
        return self._in_windows(epoch, drawn, cut)

    def _in_windows(self, epoch: int, drawn: Ints, cut: Cut) -> Ints:
        size, num_batches = cut.global_batch_size, len(drawn) // cut.global_batch_size
        edges = np.arange(min(cut.num_pieces, size) + 1) * size // min(cut.num_pieces, size)
        keys = np.random.Philox(key=np.array([self._seed, 2**63 + epoch], np.uint64))
        found = []
        for first in range(0, num_batches, cut.window):
            last = min(first + cut.window, num_batches)
            rows = drawn[first * size : last * size]
            rows = rows[np.argsort(-self._sizes[rows], kind="stable")]
            pieces = [
                part.reshape(last - first, -1)[np.argsort(keys.random_raw(last - first), kind="stable")]
                for part in np.split(rows, (last - first) * edges[1:-1])
            ]
            found.append(np.concatenate(pieces, axis=1).ravel())
        return np.concatenate([*found, drawn[num_batches * size :]])
