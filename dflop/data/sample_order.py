"""The global order of samples as a pure function of (seed, step): no sampler state to checkpoint or to lose.

Each epoch is a fresh permutation, the stable argsort of a Philox stream keyed with (seed, epoch). The raw stream is
part of NumPy's compatibility promise while `Generator.permutation` is not, so a run resumed under another NumPy or on
another machine sees the same batches. Ten million samples take 2 s and 80 MB per epoch (measured, one core), once.

With weights an epoch is still as many draws as there are samples. Systematic sampling gives each sample the whole
number of draws just below or just above its expected number, so that no epoch strays from the mixture and over epochs
nobody is forgotten; the repetitions of a sample are spread evenly over the epoch.

With a window, positions are shuffled within windows of the file and windows keep the file's order, as when a stream is
read through a buffer or the file is a curriculum. The same keys sort them, so that a window of all samples is the same
as none. Weights hold within windows, too: a window has as many draws as its samples' weights say, give or take one.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class SampleOrder:
    """Global batches of a training run, by step.

    Args:
        seed: 0 .. 2**64 - 1.
        num_samples: Healthy samples of the dataset.
        global_batch_size: Samples per optimizer step.
        weights: Shape (num_samples,), positive: expected draws, relative to one another. None: all alike.
        window: Positions that are shuffled among themselves; a window ends before the next one begins. 0: all.

    Raises:
        ValueError: a number is not positive, `window` is negative, or `weights` has another shape.
    """

    def __init__(
        self,
        seed: int,
        num_samples: int,
        global_batch_size: int,
        weights: npt.NDArray[np.float64] | None = None,
        *,
        window: int = 0,
    ) -> None:
        if num_samples < 1 or global_batch_size < 1:
            raise ValueError(f"num_samples {num_samples} and global_batch_size {global_batch_size} must be positive")
        if window < 0:
            raise ValueError(f"window {window} is negative")
        if weights is not None and (weights.shape != (num_samples,) or not (weights > 0).all()):
            raise ValueError(f"weights must be {num_samples} positive numbers")
        self._seed = seed
        self._num_samples = num_samples
        self._global_batch_size = global_batch_size
        self._weights = None if weights is None or (weights == weights[0]).all() else weights
        self._window = window or num_samples
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one may be smaller."""
        return -(-self._num_samples // self._global_batch_size)

    def epoch(self, epoch: int) -> Ints:
        """Positions 0..num_samples-1 in the order in which they are drawn; shape (num_samples,), read-only.

        Without weights, each occurs once.
        """
        return self._epoch(epoch)

    def batch(self, step: int) -> Ints:
        """Positions of the samples of one global batch, in arrival order, each at most once.

        Returns:
            Shape (global_batch_size,), or less for the last step of an epoch. A sample with a weight so large that it
            comes up twice within a batch is in it once, and the batch is smaller.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self._global_batch_size
        drawn = self.epoch(epoch)[start : start + self._global_batch_size]
        if self._weights is None:
            return drawn
        _, first = np.unique(drawn, return_index=True)
        return drawn[np.sort(first)]

    def _draw(self, epoch: int) -> Ints:
        *_, offset = keys = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(
            self._num_samples + 1
        )
        order = np.argsort(keys[:-1], kind="stable").astype(np.int64, copy=False)
        order = self._in_windows(order)
        if self._weights is not None:
            fraction = keys[:-1].astype(np.float64) * 2.0**-64
            order = self._in_windows(_repeated(order, self._weights, fraction, float(offset) * 2.0**-64))
        order.flags.writeable = False
        return order

    def _in_windows(self, order: Ints) -> Ints:
        """The same positions window by window, in their order within each."""
        if self._window >= self._num_samples:
            return order
        return order[np.argsort(order // self._window, kind="stable")]


def _repeated(order: Ints, weights: npt.NDArray[np.float64], fraction: npt.NDArray[np.float64], offset: float) -> Ints:
    """Every sample as often as its weight says, on average over offsets in 0..1; `len(order)` draws."""
    expected = np.cumsum(weights[order])
    expected *= len(order) / expected[-1]
    expected[-1] = len(order)
    reached = np.floor(expected + offset).astype(np.int64)
    counts = np.empty_like(order)
    counts[order] = np.diff(reached, prepend=0)
    drawn = np.repeat(np.arange(len(order)), counts)
    repetition = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
    return drawn[np.argsort((repetition + fraction[drawn]) / counts[drawn], kind="stable")]
