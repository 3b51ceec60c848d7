"""In whose hands a sampler is: which loader and trainer draw from it, and whether they do what it needs.

A loader or trainer says nothing of itself when it iterates over a sampler, so the calling frames are looked at, once
per iteration. What would train other samples than planned, or some of them twice, is refused before the first batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from dflop.errors import ConfigError
from dflop.sampler.costs_of_samples import SampleCosts

_MAX_FRAMES = 60
_WHERE = "BalancedBatchSampler"


@dataclass(frozen=True, slots=True)
class Hands:
    """What draws from a sampler."""

    num_prefetched: int = 0
    """Batches that a loader's workers have drawn before the first is handed out."""
    dataset: Any = None
    """Of the loader; None: no loader, or its dataset has no length."""
    num_skipped: int = 0
    """Batches that Accelerate's `skip_first_batches` draws and throws away."""
    is_dispatched: bool = False
    """One of several processes draws for all, by Accelerate's `dispatch_batches`."""
    is_trainer: bool = False
    """Hugging Face's Trainer, with the same number of microbatches in every step."""


def who_draws() -> Hands:
    """The loader and trainer above the caller's caller."""
    found: dict[str, Any] = {}
    for owner in _owners():
        names = {(c.__module__.partition(".")[0], c.__name__) for c in type(owner).__mro__}
        if isinstance(owner, _BaseDataLoaderIter) and "dataset" not in found:
            found["num_prefetched"] = owner._num_workers * (getattr(owner, "_prefetch_factor", None) or 0)
            found["dataset"] = owner._dataset if hasattr(owner._dataset, "__len__") else None
        elif ("accelerate", "SkipBatchSampler") in names:
            found["num_skipped"] = owner.skip_batches
        elif ("accelerate", "DataLoaderDispatcher") in names:
            found["is_dispatched"] = owner.state.num_processes > 1
        elif ("transformers", "Trainer") in names:
            found["is_trainer"] = True
    return Hands(**found)


def check_hands(hands: Hands, costs: SampleCosts, *, is_constant: bool, num_resumed: int) -> None:
    """Refuse what would lose, repeat or mix up samples.

    Args:
        hands: What draws.
        costs: What the sampler knows of the dataset.
        is_constant: Whether every step has the same number of microbatches.
        num_resumed: Steps within the epoch that the sampler was resumed to.

    Raises:
        ConfigError: naming what to change.
    """
    if hands.is_dispatched:
        raise _dispatched()
    if hands.is_trainer and not is_constant:
        raise ConfigError(
            "Hugging Face's Trainer takes the same number of microbatches for every step; with max_tokens it varies",
            where=_WHERE,
            hint="give num_microbatches=, equal to gradient_accumulation_steps, in place of max_tokens=",
        )
    if hands.num_skipped and num_resumed:
        raise ConfigError(
            f"resumed twice: the sampler was resumed {num_resumed} step(s) into the epoch, and the trainer skips its "
            f"first {hands.num_skipped} batch(es) by itself",
            where=_WHERE,
            hint="Hugging Face's Trainer: do not call resume, or set ignore_data_skip=True",
        )
    if hands.dataset is not None:
        _check_dataset(len(hands.dataset), costs)


def refuse_dispatch() -> None:
    """Refuse to be prepared for Accelerate's `dispatch_batches`, on every rank: later only one of them would draw.

    Raises:
        ConfigError: the caller's caller prepares for that.
    """
    for frame in _frames(2):
        given = frame.f_locals
        if frame.f_code.co_name == "prepare_data_loader" and given.get("dispatch_batches"):
            if given.get("num_processes") != 1:
                raise _dispatched()
            return


def _dispatched() -> ConfigError:
    return ConfigError(
        "Accelerate's dispatch_batches deals the batches of one process out to all; those of the others are lost",
        where=_WHERE,
        hint="leave the loader out of accelerator.prepare",
    )


def _check_dataset(num_samples: int, costs: SampleCosts) -> None:
    if costs.index is None and len(costs) != num_samples:
        raise ConfigError(
            f"there are costs of {len(costs)} samples, and {num_samples} samples in the loader's dataset",
            where=_WHERE,
            hint="costs must be of this dataset, in its order; of a part of it, give SampleCosts(index=...)",
        )
    if costs.index is not None and int(costs.index.max()) >= num_samples:
        raise ConfigError(
            f"there are costs of sample {int(costs.index.max())}, the loader's dataset has {num_samples} samples",
            where=_WHERE,
            hint="costs must be of this dataset",
        )


def _owners() -> Iterator[Any]:
    """`self` of the methods that are being run, from the inside."""
    for frame in _frames(3):
        if frame.f_code.co_varnames[:1] == ("self",) and (owner := frame.f_locals.get("self")) is not None:
            yield owner


def _frames(depth: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(depth)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
