"""Which rank trains on what in a step: a pure function of the costs, the seed and the step's number.

Which samples form a global batch comes from an `Order` and does not depend on ranks, nor, without a window, on
microbatches or costs; how they are dealt out comes from `balance_ranks`. So every rank plans for itself, without a
message, and a run that goes on with other ranks goes on with the same global batches. With batches of another size it
goes on after the same sample: steps are counted from an `Origin`.

A window of W global batches holds the same samples as W random ones. They are sorted by size and cut into pieces, and
each batch gets one piece of every size range, so that microbatches need hardly any padding and ranks hardly wait, even
where a random global batch is too small for that. What it costs: samples of a step have similar lengths by design, as
under `group_by_length`; with several microbatches less so, since a batch then has pieces of several ranges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from dflop.cost.model import Floats
from dflop.data.sample_order import SampleOrder
from dflop.errors import ConfigError
from dflop.sampler.costs_of_samples import Ints, SampleCosts
from dflop.schedule.data_parallel import RankPlan, Sync, balance_ranks
from dflop.schedule.pack import token_cap
from dflop.schedule.padded import balance_padded

WHERE = "BalancedBatchSampler"
KEPT_PLANS = 256
"""Plans kept for whoever asks for a step again: a loader's workers are that far ahead of training at most."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the order of an epoch becomes global batches."""

    global_batch_size: int
    window: int = 1
    """Global batches whose samples are sorted together; 1: none are."""
    num_pieces: int = 1
    """Number of different size ranges in a global batch of a window."""


class Order(Protocol):
    """Rows of `SampleCosts`, epoch by epoch."""

    num_drawn: int
    """In every epoch."""

    def epoch(self, epoch: int, cut: Cut) -> Ints:
        """`[num_drawn]` rows, one global batch after the other."""


class RandomOrder:
    """A permutation per epoch, a function of the seed and the epoch."""

    def __init__(self, seed: int, costs: SampleCosts, *, padded: bool) -> None:
        self.num_drawn = len(costs)
        self._seed, self._weights = seed, costs.weights
        self._sizes: Floats | Ints = costs.tokens if padded else costs.seconds

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


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One global batch, dealt out."""

    step: int
    rows: Ints
    """`[samples]` positions in the costs, in arrival order."""
    samples: Ints
    """`[samples]` positions in the dataset."""
    supervised: Ints | None
    """`[samples]` tokens that carry loss."""
    dealt: RankPlan
    filler: int
    """Position in the dataset of the sample that a rank without work in a microbatch repeats, unscored."""

    def rank(self, rank: int) -> list[list[int]]:
        """Positions in the dataset, per microbatch of a rank; a filler where there is nothing to do."""
        return [self.samples[positions].tolist() or [self.filler] for positions in self.dealt.of_rank(rank)]

    def rank_supervised(self, rank: int) -> list[int] | None:
        """Tokens that carry loss, per microbatch of a rank; 0 for a filler. None: unknown."""
        return None if self.supervised is None else [int(self.supervised[p].sum()) for p in self.dealt.of_rank(rank)]

    def is_filler(self, rank: int) -> list[bool]:
        """Per microbatch of a rank: whether its sample counts elsewhere and must not count here."""
        return [not len(positions) for positions in self.dealt.of_rank(rank)]


@dataclass(frozen=True, slots=True)
class Origin:
    """From where steps are counted: the beginning, or a checkpoint that was made with another cut."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    """Samples of the epoch that were trained before."""
    cut: Cut | None = None
    """How the order of this epoch is cut; None: the same as afterwards."""


@dataclass(eq=False)
class Planner:
    """Plans of steps; see `BalancedBatchSampler` for most of its fields."""

    costs: SampleCosts
    cut: Cut
    order: Order
    num_microbatches: int | None
    max_tokens: int | None = None
    sync: Sync = "step"
    padded: bool = False
    drop_last: bool = False
    num_replicas: int = 1
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        self._prepare()
        self._check_sizes()

    def deal_to(self, num_replicas: int) -> None:
        """Plan for so many data-parallel ranks from now on.

        Raises:
            ConfigError: a global batch has too few samples for them.
        """
        if num_replicas != self.num_replicas:
            self.num_replicas = num_replicas
            self._check_sizes()
            self._prepare()

    def start_from(self, origin: Origin) -> None:
        """Count steps from there from now on."""
        self.origin = origin
        self._prepare()

    @property
    def is_shifted(self) -> bool:
        """Whether epochs begin elsewhere than they would with global batches that always had this size."""
        return self.origin.offset > 0 or self.origin.step != self.origin.epoch * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self._num_steps(self.order.num_drawn)

    def first_step(self, epoch: int) -> int:
        """First step of an epoch; where it was begun before the origin, the first one after it."""
        start = self.origin
        if epoch <= start.epoch:
            return start.step
        rest = self._num_steps(self.order.num_drawn - start.offset)
        return start.step + rest + (epoch - start.epoch - 1) * self.steps_per_epoch

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, samples of it that come before the step).

        Raises:
            ConfigError: the step is negative, or before the checkpoint from which steps are counted.
        """
        start = self.origin
        if step < start.step:
            raise refused(f"step {step} is before step {start.step}")
        if step < (second := self.first_step(start.epoch + 1)):
            return start.epoch, start.offset + (step - start.step) * self.cut.global_batch_size
        epoch, within = divmod(step - second, self.steps_per_epoch)
        return start.epoch + 1 + epoch, within * self.cut.global_batch_size

    def cut_of(self, epoch: int) -> Cut:
        """What the order of an epoch is made for."""
        return self.origin.cut or self.cut if epoch == self.origin.epoch else self.cut

    def rows(self, epoch: int) -> Ints:
        """`[samples]` positions in the costs, in the order of an epoch."""
        return self._rows(epoch, self.cut_of(epoch))

    def plans(self, first: int, end: int, ahead: int) -> Iterator[BatchPlan]:
        """Plans of the steps `first` .. `end` - 1, made up to `ahead` steps early in a thread of their own."""
        for step in {first, max(first, end - 1)}:  # here, not in the thread: somebody's sampler may draw
            self.rows(self.place(step)[0])
        if not ahead:
            yield from map(self.plan, range(first, end))
            return
        pool = ThreadPoolExecutor(1, thread_name_prefix="dflop-plans")
        try:
            waiting: list[Future[BatchPlan]] = []
            for step in range(first, end):
                for early in range(step + len(waiting), min(step + ahead + 1, end)):
                    waiting.append(pool.submit(self.plan, early))
                yield waiting.pop(0).result()
        finally:
            # Not waited for: the garbage collector may be what ends an abandoned iteration, in a thread that is just
            # being started, which would wait for itself.
            pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, step: int) -> BatchPlan:
        epoch, first = self.place(step)
        rows = self.rows(epoch)[first : first + self.cut.global_batch_size]
        costs = self.costs
        if costs.weights is not None:  # a sample that comes up twice within a batch is in it once
            rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
        samples = rows if costs.index is None else costs.index[rows]
        supervised = None if costs.supervised is None else costs.supervised[rows]
        return BatchPlan(step, rows, samples, supervised, self._deal(rows), int(samples[costs.tokens[rows].argmin()]))

    def _deal(self, rows: Ints) -> RankPlan:
        """Ranks and microbatches; the rest of an epoch has fewer of these, where samples do not suffice."""
        seconds, tokens, ranks = self.costs.seconds[rows], self.costs.tokens[rows], self.num_replicas
        constant = self.num_microbatches
        num = constant and max(1, min(constant, len(rows) // ranks))
        given: dict[str, Any] = {"fixed_s": self.costs.fixed_s, "sync": self.sync}
        if self.padded:
            fits = num is not None and len(rows) >= ranks * num  # else a sample per rank, as far as they go
            dealt = balance_padded(
                seconds, tokens, ranks, cap_tokens=self.max_tokens, num_microbatches=num if fits else None, **given
            )
        else:
            cap = self.max_tokens or max(1, token_cap(tokens, ranks * (num or 1)))
            dealt = balance_ranks(seconds, tokens, ranks, cap_tokens=cap, num_microbatches=num, **given)
        # In an epoch that is not where the trainer takes it to be, every step has as many as all others.
        return replace(dealt, num_microbatches=constant) if constant and self.is_shifted else dealt

    def _num_steps(self, num_samples: int) -> int:
        full, rest = divmod(num_samples, self.cut.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def microbatches_per_epoch(self) -> int:
        """Per rank, where steps have a constant number; fewer in the rest of an epoch."""
        num, rest = self.num_microbatches or 1, self.order.num_drawn % self.cut.global_batch_size
        missing = num - max(1, min(num, rest // self.num_replicas)) if rest and not self.drop_last else 0
        return self.steps_per_epoch * num - (0 if self.is_shifted else missing)

    def _check_sizes(self) -> None:
        num_samples, size = self.order.num_drawn, self.cut.global_batch_size
        if self.steps_per_epoch < 1:
            raise refused(f"drop_last leaves nothing of {num_samples} samples at a global batch size of {size}")
        if self.num_microbatches is not None and size < self.num_replicas * self.num_microbatches:
            raise refused(
                f"a global batch has {size} sample(s) for {self.num_replicas} rank(s) x {self.num_microbatches} "
                "microbatch(es)",
                "make global_batch_size larger, or num_microbatches smaller",
            )

    def _prepare(self) -> None:
        self._rows = functools.lru_cache(maxsize=2)(self.order.epoch)
        self.plan: Callable[[int], BatchPlan] = functools.lru_cache(KEPT_PLANS)(self._make)
        """The plan of a step (from 0, counted over epochs). May be called from several threads."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_rows", "plan")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


def warm_up(sync: Sync) -> None:
    """Compile, or load from disk, what plans need: seconds once, at a time when nobody waits for a batch."""
    balance_ranks(np.arange(1.0, 5.0), np.arange(1, 5), 2, cap_tokens=10, num_microbatches=1, sync=sync)
    balance_ranks(np.ones(3), np.array([6, 5, 4]), 1, cap_tokens=10, sync=sync)


def refused(what: str, hint: str = "") -> ConfigError:
    """What `BalancedBatchSampler` does not do."""
    return ConfigError(what, where=WHERE, hint=hint)
