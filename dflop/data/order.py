"""The global order of samples as a pure function of (seed, step): no sampler state to checkpoint or to lose.

Each epoch is a fresh permutation, the stable argsort of a Philox stream keyed with (seed, epoch). The raw stream is
part of NumPy's compatibility promise while `Generator.permutation` is not, so a run resumed under another NumPy or on
another machine sees the same batches. Ten million samples take 2 s and 80 MB per epoch (measured, one core), once.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Optimizer steps that see every sample once; the last one may be smaller.

    Raises:
        ValueError: either argument is not positive.
    """
    if num_samples < 1 or global_batch_size < 1:
        raise ValueError(f"num_samples {num_samples} and global_batch_size {global_batch_size} must be positive")
    return -(-num_samples // global_batch_size)


def epoch_of(step: int, num_samples: int, global_batch_size: int) -> int:
    """Epoch (from 0) that `step` (from 0) belongs to."""
    return step // steps_per_epoch(num_samples, global_batch_size)


def global_batch(seed: int, step: int, num_samples: int, global_batch_size: int) -> npt.NDArray[np.int64]:
    """Positions 0..num_samples-1 of the samples of one global batch, in arrival order.

    Over the steps of an epoch every position occurs exactly once.

    Args:
        seed: 0 .. 2**64 - 1.
        step: Optimizer step, from 0, counted over all epochs.
        num_samples: Healthy samples of the dataset.
        global_batch_size: Samples per optimizer step.

    Returns:
        Shape (global_batch_size,), or less for the last step of an epoch.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    epoch, step_in_epoch = divmod(step, steps_per_epoch(num_samples, global_batch_size))
    start = step_in_epoch * global_batch_size
    return epoch_order(seed, epoch, num_samples)[start : start + global_batch_size]


@functools.lru_cache(maxsize=2)  # a pure function's memo: the steps of an epoch share it
def epoch_order(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Permutation of 0..num_samples-1 for one epoch, read-only."""
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_samples)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
