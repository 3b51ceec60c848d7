"""Which rank trains on what in a step: a pure function of the costs, the seed and the step's number.

Which samples form a global batch comes from `SampleOrder` and does not depend on ranks, microbatches or costs; how they
are dealt out comes from `balance_ranks`. So every rank plans for itself, without a message, and a run that goes on with
other ranks goes on with the same global batches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from dflop.data.sample_order import SampleOrder
from dflop.errors import ConfigError
from dflop.sampler.costs_of_samples import Ints, SampleCosts
from dflop.schedule.data_parallel import RankPlan, Sync, balance_ranks
from dflop.schedule.pack import token_cap
from dflop.schedule.padded import balance_padded

KEPT_PLANS = 256
"""Plans kept for whoever asks for a step again: a loader's workers are that far ahead of training at most."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One global batch, dealt out."""

    step: int
    samples: Ints
    """`[samples]` positions in the dataset, in arrival order."""
    supervised: Ints | None
    """`[samples]` tokens that carry loss."""
    dealt: RankPlan
    filler: int
    """Position in the dataset of the sample that a rank without work in a microbatch repeats, unscored."""

    def rank(self, rank: int) -> list[list[int]]:
        """Positions in the dataset, per microbatch of a rank; a filler where there is nothing to do."""
        mine = self.dealt.rank == rank
        return [
            self.samples[mine & (self.dealt.slot == slot)].tolist() or [self.filler]
            for slot in range(self.dealt.num_microbatches)
        ]

    def rank_supervised(self, rank: int) -> list[int] | None:
        """Tokens that carry loss, per microbatch of a rank; 0 for a filler. None: unknown."""
        if self.supervised is None:
            return None
        mine = self.dealt.rank == rank
        return [
            int(self.supervised[mine & (self.dealt.slot == slot)].sum()) for slot in range(self.dealt.num_microbatches)
        ]

    def is_filler(self, rank: int) -> list[bool]:
        """Per microbatch of a rank: whether its sample counts elsewhere and must not count here."""
        mine = self.dealt.rank == rank
        return [not (mine & (self.dealt.slot == slot)).any() for slot in range(self.dealt.num_microbatches)]


class Planner:
    """Plans of steps; see `BalancedBatchSampler` for the arguments."""

    def __init__(
        self,
        costs: SampleCosts,
        global_batch_size: int,
        *,
        num_microbatches: int | None,
        max_tokens: int | None,
        sync: Sync,
        padded: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.costs, self.global_batch_size = costs, global_batch_size
        self.num_replicas, self.num_microbatches, self.max_tokens = 1, num_microbatches, max_tokens
        self.sync: Sync = sync
        self.padded = padded
        self.seed, self.drop_last = seed, drop_last
        self._check_sizes()
        self._prepare()

    def deal_to(self, num_replicas: int) -> None:
        """Plan for so many data-parallel ranks from now on.

        Raises:
            ConfigError: a global batch has too few samples for them.
        """
        if num_replicas != self.num_replicas:
            self.num_replicas = num_replicas
            self._check_sizes()
            self._prepare()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        full, rest = divmod(len(self.costs), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def plan(self, step: int) -> BatchPlan:
        """The plan of a step (from 0, counted over epochs). May be called from several threads."""
        with self._lock:
            if step in self._plans:
                return self._plans[step]
        made = self._make(step)
        with self._lock:
            self._plans[step] = made
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        return made

    def plans(self, first: int, end: int, ahead: int) -> Iterator[BatchPlan]:
        """Plans of the steps `first` .. `end` - 1, made up to `ahead` steps early in a thread of their own."""
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
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        drawn = self._order.batch(epoch * self._order.steps_per_epoch + step_in_epoch)
        costs, tokens = self.costs, self.costs.tokens[drawn]
        if self.num_microbatches is not None and len(drawn) < self.num_replicas * self.num_microbatches:
            raise self._too_few(len(drawn))
        if self.padded:
            dealt = balance_padded(
                costs.seconds[drawn],
                tokens,
                self.num_replicas,
                cap_tokens=self.max_tokens,
                fixed_s=costs.fixed_s,
                num_microbatches=self.num_microbatches,
                sync=self.sync,
            )
        else:
            num_buckets = self.num_replicas * (self.num_microbatches or 1)
            dealt = balance_ranks(
                costs.seconds[drawn],
                tokens,
                self.num_replicas,
                cap_tokens=self.max_tokens or max(1, token_cap(tokens, num_buckets)),
                fixed_s=costs.fixed_s,
                num_microbatches=self.num_microbatches,
                sync=self.sync,
            )
        samples = drawn if costs.index is None else costs.index[drawn]
        supervised = None if costs.supervised is None else costs.supervised[drawn]
        return BatchPlan(step, samples, supervised, dealt, int(samples[tokens.argmin()]))

    def _check_sizes(self) -> None:
        num_samples, size = len(self.costs), self.global_batch_size
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"drop_last leaves nothing of {num_samples} samples at a global batch size of {size}",
                where="BalancedBatchSampler",
            )
        if self.num_microbatches is not None:
            rest = 0 if self.drop_last else num_samples % size
            for smallest in (min(size, num_samples), rest or size):
                if smallest < self.num_replicas * self.num_microbatches:
                    raise self._too_few(smallest)

    def _too_few(self, num_samples: int) -> ConfigError:
        is_rest = num_samples == len(self.costs) % self.global_batch_size < len(self.costs)
        which = "the last global batch of an epoch has" if is_rest else "a global batch has"
        return ConfigError(
            f"{which} {num_samples} sample(s) for {self.num_replicas} rank(s) x {self.num_microbatches} microbatch(es)",
            where="BalancedBatchSampler",
            hint="set drop_last=True: other samples are left out in every epoch"
            if is_rest
            else "make global_batch_size larger, or num_microbatches smaller",
        )

    def _prepare(self) -> None:
        self._order = SampleOrder(self.seed, len(self.costs), self.global_batch_size, self.costs.weights)
        self._plans: OrderedDict[int, BatchPlan] = OrderedDict()
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_order", "_plans", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


def warm_up(sync: Sync) -> None:
    """Compile, or load from disk, what plans need: seconds once, at a time when nobody waits for a batch."""
    balance_ranks(np.arange(1.0, 5.0), np.arange(1, 5), 2, cap_tokens=10, num_microbatches=1, sync=sync)
    balance_ranks(np.ones(3), np.array([6, 5, 4]), 1, cap_tokens=10, sync=sync)
