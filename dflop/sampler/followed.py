"""Somebody else's order, followed: the global batches are those of a trainer's own sampler, dealt out by dflop.

A loader deals consecutive batches to ranks in turn, so that a global batch is so many consecutive draws of its sampler,
whatever the sampler is. Every rank draws an epoch for itself, from random numbers of its own that depend on the seed
and the epoch alone: a resumed run comes by the same order, and the training's random numbers are left as they were.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from dflop.errors import ConfigError
from dflop.sampler.costs_of_samples import Ints, SampleCosts
from dflop.sampler.rank_plans import Cut

_WHERE = "BalancedTrainer"


class FollowedOrder:
    """Rows in the order in which a sampler, or a batch sampler, draws them.

    Args:
        source: Gives positions in the dataset, or lists of them; told the epoch if it has `set_epoch`.
        costs: Of the dataset's samples; what they leave out is left out here.
        seed: Of what the source draws at random, where it has no generator of its own.
        batch_size: Of the lists; None: as the first one.

    Raises:
        ConfigError: it has no end, draws what has no cost, or lists of other sizes.
    """

    def __init__(self, source: Iterable[Any], costs: SampleCosts, seed: int, batch_size: int | None = None) -> None:
        self._source, self._seed, self._batch_size = source, seed, batch_size
        where = np.arange(len(costs)) if costs.index is None else costs.index
        self._has_all = costs.index is None
        self._rows = np.full(int(where.max()) + 1, -1)
        self._rows[where] = np.arange(len(where))
        self._owners = [x for x in (source, getattr(source, "sampler", None)) if x is not None]
        generators = [g for x in self._owners if isinstance(g := getattr(x, "generator", None), torch.Generator)]
        self._generators = [(g, g.initial_seed()) for g in generators]
        self._first = self._draw(0)  # kept: some samplers move on each time they are drawn from
        self.num_drawn = len(self._first)

    def epoch(self, epoch: int, cut: Cut) -> Ints:
        """As `Order` says.

        Raises:
            ConfigError: as above, or other epochs have another number of samples.
        """
        found = self._draw(epoch) if epoch else self._first
        if len(found) != self.num_drawn:
            raise refused(
                f"{self.name} draws {len(found)} samples in epoch {epoch}, and {self.num_drawn} in epoch 0",
                "the number of steps must be known before training: draw as many in every epoch",
            )
        return found

    @property
    def name(self) -> str:
        return type(self._source).__name__

    def _draw(self, epoch: int) -> Ints:
        for owner in self._owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        for generator, seed in self._generators:
            generator.manual_seed(seed + epoch)
        with _seeded(self._seed + epoch):
            positions = self._flat(itertools.islice(self._source, self._limit()))
        inside = (positions >= 0) & (positions < len(self._rows))
        rows = np.where(inside, self._rows[np.where(inside, positions, 0)], -1)
        if self._has_all and (rows < 0).any():
            raise refused(f"{self.name} draws sample {positions[rows < 0][0]}, of {len(self._rows)} samples", "")
        rows = rows[rows >= 0]
        if not len(rows):
            raise refused(f"{self.name} draws no sample with a known cost", "give costs of the whole dataset")
        return rows

    def _limit(self) -> int:
        try:
            return len(self._source)  # type: ignore[arg-type]  # what has none raises
        except (TypeError, NotImplementedError):
            raise refused(
                f"{self.name} has no length, so that the steps of an epoch cannot be counted",
                "give the sampler a __len__, or train with the plain trainer",
            ) from None

    def _flat(self, drawn: Iterator[Any]) -> Ints:
        found, sizes = list[Any](), list[int]()
        for each in drawn:
            batch = [each]
            if isinstance(each, list | tuple):
                batch = list(each)
                sizes.append(len(batch))
            found += batch
            if not all(isinstance(i, int | np.integer) or (isinstance(i, torch.Tensor) and not i.ndim) for i in batch):
                raise refused(f"{self.name} packs several samples into one", "pack the dataset, or use plain trainer")
        size = self._batch_size or (sizes[0] if sizes else 1)
        if any(of != size for of in sizes[:-1]):
            raise refused(
                f"{self.name} makes batches of {min(sizes)} to {max(sizes)} samples, not of {size}",
                "such batches cannot be redistributed: give a sampler of single samples, or use the plain trainer",
            )
        return np.array([int(i) for i in found], dtype=np.int64)


def order_of(loader: DataLoader[Any], batch_size: int) -> Iterable[Any] | None:
    """What a trainer's own loader draws from, to be followed; None: a random order, as dflop's own is.

    Raises:
        ConfigError: its global batches are not so many consecutive samples.
    """
    batches: Any = loader.batch_sampler
    while type(batches).__module__.startswith("accelerate.") and hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if batches is None or type(batches).__name__ == "BatchRebalanceSampler":  # which deals out random global batches
        return None
    if (size := getattr(batches, "batch_size", None)) not in (None, batch_size):
        raise refused(
            f"the trainer's own loader has batches of {size}, per_device_train_batch_size is {batch_size}",
            "use the plain trainer",
        )
    source = batches.sampler if type(batches) is BatchSampler else batches
    if hasattr(source, "mini_repeat_count"):
        raise refused(f"{type(source).__name__} repeats prompts, whose groups must stay together", "use plain trainer")
    if isinstance(source, DistributedSampler) and source.num_replicas > 1:
        raise refused("DistributedSampler draws for one rank", "give a sampler of the whole dataset")
    if (shuffle := getattr(source, "shuffle", None)) is not None and not isinstance(source, DistributedSampler):
        if getattr(source, "group_by_length", False):  # as ms-swift's, each of which draws for one rank
            raise refused("group_by_length: its batches are made for one rank", "switch it off; window= is like it")
        return None if shuffle else SequentialSampler(loader.dataset)  # type: ignore[arg-type]  # it has a length
    if not isinstance(source, RandomSampler) or type(source) is not RandomSampler:
        return source
    is_default = not source.replacement and source.generator is None and source.num_samples == len(source.data_source)
    return None if is_default else source


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global random numbers from a seed, and afterwards as before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # samplers of others draw from it
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # as above
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002  # as above


def refused(what: str, hint: str) -> ConfigError:
    """What a trainer under `BalancedTrainer` cannot do."""
    return ConfigError(what, where=_WHERE, hint=hint)
