"""The batch sampler: balanced microbatches of this rank for `torch.utils.data.DataLoader(batch_sampler=...)`.

Which rank this is, of how many, is looked up when an iteration begins: trainers initialise torch.distributed after the
sampler was made. Resuming goes by the number of optimizer steps that were trained: `resume(step)` before the first
batch is all there is to it; how many ranks or microbatches there were before does not matter. With a global batch of
another size it takes `load_state_dict`: the epoch goes on after the last sample that was trained.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from dflop.balance.numbers import check_positive
from dflop.errors import ConfigError, did_you_mean
from dflop.sampler.accumulation import Step
from dflop.sampler.costs_of_samples import SampleCosts, sample_costs
from dflop.sampler.draws import Draws, Progress, Start
from dflop.sampler.followed import FollowedOrder
from dflop.sampler.loader_context import PlaceUnknown, check_loader, find_place, inspect_loader, refuse_dispatch
from dflop.sampler.rank_plans import BatchPlan, Cut, Origin, Planner, RandomOrder, refused, warm_up
from dflop.schedule.data_parallel import Sync

SYNCS = ("step", "microbatch")

_log = logging.getLogger(__name__)


class BalancedBatchSampler(Sampler[list[int]]):
    """Microbatches of one rank: same samples per optimizer step as any plan, dealt out so that ranks end together.

    Every rank makes the same plan by itself. Each sample comes once per epoch; every rank has the same number of
    microbatches in a step and at least one sample in each. An epoch whose batches were all handed out is followed by
    the next one, with or without `set_epoch`; one that was left earlier begins anew, with or without workers.

    When torch.distributed is initialised and neither `num_replicas` nor `rank` is given, the first iteration begins
    with a collective call: ranks compare their costs, since ranks that plan from different ones would lose samples.

    Args:
        costs: Of every sample; a plain sequence is taken as lengths in tokens.
        global_batch_size: Samples per optimizer step, over all ranks and microbatches.
        num_microbatches: Per rank and step, as trainers with a constant gradient accumulation need it; 1 when neither
            this nor `max_tokens` is given. No microbatch is over 1.25 times the average in tokens, if samples allow it.
        max_tokens: Instead: no microbatch has more, and there are as many of them as that takes, which differs from
            step to step. For loops over `steps()`. A longer sample has a microbatch to itself.
        num_replicas: Data-parallel ranks; None: as torch.distributed, or WORLD_SIZE, says when an iteration begins.
        rank: This one among them; None: as torch.distributed, or RANK, says then.
        sync: Where ranks wait for one another: once per `step` (DDP under `no_sync`, or no accumulation) or in every
            `microbatch` (FSDP, ZeRO-3).
        padded: Whether the collator pads samples to the longest of their microbatch: then samples of similar length
            share one. False: it puts them one after the other.
        seed: Of the order.
        drop_last: Leave out the samples beyond the last full global batch of an epoch; other ones in every epoch.
            False: they are a step with fewer microbatches; where they are fewer than ranks, some repeat a sample that
            does not count.
        window: Global batches whose samples are sorted together, so that those of a step are similar: less waiting and
            padding where a global batch has few samples, and steps that are no random choice any more, as under
            `group_by_length`. 1: each is a random choice.
        order: A sampler, or a batch sampler, whose global batches are taken; None: a random order by the seed.
        ahead: Steps planned early by a thread; 0: none, each is planned when its first batch is drawn.

    Raises:
        ConfigError: numbers that contradict one another, or ranks whose costs differ.
    """

    def __init__(
        self,
        costs: SampleCosts | Iterable[int],
        global_batch_size: int,
        *,
        num_microbatches: int | None = None,
        max_tokens: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        sync: Sync = "step",
        padded: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        window: int = 1,
        order: Iterable[Any] | FollowedOrder | None = None,
        ahead: int = 2,
    ) -> None:
        numbers = {
            "global_batch_size": global_batch_size, "num_microbatches": num_microbatches, "max_tokens": max_tokens,
            "window": window,
        }  # fmt: skip
        for name, number in numbers.items():
            if number is not None:
                check_positive(name, number, "BalancedBatchSampler")
        if num_microbatches is not None and max_tokens is not None:
            raise refused(
                "num_microbatches and max_tokens are both given",
                "a constant number of microbatches, or as many as fit into max_tokens",
            )
        if order is not None and window > 1:
            raise refused(
                "window rearranges global batches, and order says what they are",
                "give one of them; under Hugging Face's Trainer a window goes with the random order alone",
            )
        if sync not in SYNCS:
            raise refused(f"unknown sync `{sync}`", did_you_mean(sync, SYNCS))
        if not isinstance(costs, SampleCosts):
            costs = sample_costs(costs)
        num_microbatches = num_microbatches or (None if max_tokens else 1)
        followed = order if order is None or isinstance(order, FollowedOrder) else FollowedOrder(order, costs, seed)
        cut = Cut(global_batch_size, window, num_microbatches or 1)
        self.planner = Planner(
            costs, cut, followed or RandomOrder(seed, costs, padded=padded), num_microbatches, max_tokens, sync, padded,
            drop_last,
        )  # fmt: skip
        """What makes its plans."""
        self._seed = seed
        self.num_trained: Callable[[], int] | None = None
        """A trainer's count of the steps that it trained, where an iteration begins by that, whatever is skipped."""
        self._ahead = ahead
        self._step = 0
        """Where it stands: steps before it, over all epochs."""
        self._progress: Progress | None = None
        self._current: Step | None = None
        self._is_stepping = False
        self._given, self._is_compared = (rank, num_replicas), False
        with contextlib.suppress(PlaceUnknown):  # it will be known when an iteration begins
            self._settle()
        warm_up(sync)

    @property
    def rank(self) -> int:
        """This one among the data-parallel ranks; 0 until that is known."""
        return self._place_now()[0]

    @property
    def num_replicas(self) -> int:
        """Data-parallel ranks; 1 until that is known."""
        return self._place_now()[1]

    @property
    def costs(self) -> SampleCosts:
        return self.planner.costs

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.planner.steps_per_epoch

    @property
    def num_microbatches(self) -> int | None:
        """Per rank and step; None where it differs from step to step."""
        return self.planner.num_microbatches

    def __len__(self) -> int:
        """Microbatches of this rank in a whole epoch."""
        if self.num_microbatches is None:
            raise TypeError("with max_tokens the number of microbatches is not known in advance; see steps_per_epoch")
        return self.planner.microbatches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        context, is_stepping = inspect_loader(), self._is_stepping

        def begin() -> Start:
            if not is_stepping:
                self._leave_last()
            num_skipped = 0
            if self.num_trained is not None:
                num_skipped = context.num_skipped
                self.resume(self.num_trained())
            is_constant = is_stepping or self.num_microbatches is not None
            num_resumed = 0 if num_skipped else self._step - self.planner.first_step(self._epoch)
            check_loader(context, self.costs, is_constant=is_constant, num_resumed=num_resumed)
            rank, _ = self._settle()
            first, end = self._step, self.planner.first_step(self._epoch + 1)
            if self.num_trained is not None and self.planner.is_shifted:  # the trainer's epochs end elsewhere
                end = first + self.steps_per_epoch
            return Start(rank, first, end, functools.partial(self.planner.plans, ahead=self._ahead), num_skipped)

        return Draws(begin, functools.partial(setattr, self, "_progress"), context.num_prefetched)

    def steps(self, loader: Iterable[Any] | None = None, *, until: int | None = None) -> Iterator[Step]:
        """Optimizer steps from where the sampler stands to the end of the epoch.

        Args:
            loader: The `DataLoader` of this sampler; None: the steps' microbatches are positions in the dataset.
            until: Go on over epochs until so many steps, counted from the first of all, are trained.

        Raises:
            ConfigError: the loader draws from another sampler.
            TrainError: the loader ends before the step does.
        """
        if (other := getattr(loader, "batch_sampler", self)) is not self:
            raise ConfigError(
                f"the loader draws from {type(other).__name__} at {id(other):#x}, not from this sampler",
                where="BalancedBatchSampler.steps",
                hint="make the loader with DataLoader(dataset, batch_sampler=sampler) of the same sampler",
            )
        return self._steps(loader, until)

    def _steps(self, loader: Iterable[Any] | None, until: int | None) -> Iterator[Step]:
        self._leave_last()
        while True:
            step, end = self._step, self.planner.first_step(self._epoch + 1)
            end = end if until is None else min(end, until)
            rank, num_replicas = self._settle()
            self._is_stepping = True
            try:
                batches = None if loader is None else iter(loader)
            finally:
                self._is_stepping = False
            for plan in self.planner.plans(step, end, self._ahead if loader is None else 0):
                self._current = found = Step(plan, rank, num_replicas, batches)
                yield found
                found.skip_rest()
            self.resume(max(step, end))
            if until is None or end >= until:
                return

    def planned(self, step: int) -> BatchPlan:
        """The plan of a step (from 0, counted over epochs): who trains on what, and how long that should take."""
        self.planner.deal_to(find_place(*self._given)[1])
        return self.planner.plan(step)

    def step(self, number: int) -> Step:
        """A step (from 0, counted over epochs) for trainers that draw its microbatches themselves."""
        return Step(self.planned(number), *find_place(*self._given), None)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (from 0); where the sampler was resumed within it, to that place."""
        if self._progress is not None and self._progress.is_over:
            self._leave_last()
        if epoch != self._epoch:
            self.resume(self.planner.first_step(epoch))

    def resume(self, step: int) -> None:
        """Go to an optimizer step: the number of those that were trained, over all epochs.

        Hugging Face's Trainer skips what was trained by itself: leave it to that, or set `ignore_data_skip`. Lightning
        does not: call this with the checkpoint's global step before `fit`. torchdata's StatefulDataLoader restores the
        sampler by itself.

        Raises:
            ConfigError: the number is negative, or before a checkpoint whose global batches had another size.
        """
        self.planner.place(step)
        self._step = step
        self._progress = self._current = None

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """State as a few integers, for a checkpoint.

        Args:
            step: Optimizer steps trained so far, over all epochs. None: those whose batches were all handed out to the
                loop; what a loader's workers have drawn beyond that does not count.
        """
        step = self._num_trained() if step is None else step
        epoch, offset = self.planner.place(step)
        cut = asdict(self.planner.cut_of(epoch))
        return {"step": step, "epoch": epoch, "offset": offset, **cut, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a checkpoint was made, with any number of ranks and microbatches and any global batch size.

        Raises:
            ConfigError: the state is of another order of samples.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"{name} is {value}, the checkpoint was made with {state.get(name)}",
                    where="BalancedBatchSampler.load_state_dict",
                    hint="the same samples in the same order need the same value",
                )
        step, epoch, offset = (state[name] for name in ("step", "epoch", "offset"))
        cut = Cut(*(state[name] for name in ("global_batch_size", "window", "num_pieces")))
        is_alike = cut == self.planner.cut or self.planner.cut.window == cut.window == 1
        size = self.planner.cut.global_batch_size
        if cut.global_batch_size != size or not is_alike or self.planner.place(step) != (epoch, offset):
            self.planner.start_from(Origin(step, epoch, offset, cut))
            _log.info(
                "global batches have %d samples and had %d: epoch %d continues after its first %d samples", size,
                cut.global_batch_size, epoch, offset,
            )  # fmt: skip
        self.resume(step)

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself: Lightning and Accelerate look here for whoever has `set_epoch`.

        Raises:
            ConfigError: Accelerate prepares to draw on one rank for all.
        """
        refuse_dispatch()
        return self

    @property
    def batch_sampler(self) -> BalancedBatchSampler:
        """Itself: Hugging Face's Trainer looks here for whoever has `set_epoch`."""
        return self

    @property
    def batch_size(self) -> int:
        """None: batches differ. Who asks is about to share them out among ranks, which was done already.

        Raises:
            ConfigError: always.
        """
        raise refused(
            "these batches are this rank's own and differ in size; they must not be sharded again",
            "leave the loader out of accelerator.prepare; Lightning: Trainer(use_distributed_sampler=False)",
        )

    @property
    def _epoch(self) -> int:
        return self.planner.place(self._step)[0]

    def _leave_last(self) -> None:
        """An iteration begins: the one before it had the whole epoch, or its epoch begins anew."""
        if self._progress is not None and self._progress.is_over:
            self.resume(self._progress.end)
        elif (num_trained := self._num_trained()) > self._step:
            _log.info(
                "epoch %d was left after %d of %d steps and restarts", self._epoch,
                num_trained - self.planner.first_step(self._epoch), self.steps_per_epoch,
            )  # fmt: skip
        self._progress = self._current = None

    def _num_trained(self) -> int:
        """Steps whose microbatches the loop has."""
        if self._current is not None:
            return self._current.number + self._current.is_drawn
        return self._step if self._progress is None else self._progress.step

    def _place_now(self) -> tuple[int, int]:
        try:
            return find_place(*self._given)
        except PlaceUnknown:
            return 0, 1

    def _settle(self) -> tuple[int, int]:
        """(rank, ranks) to plan for; the first time that torch.distributed says who they are, they compare costs."""
        place = find_place(*self._given)
        self.planner.deal_to(place[1])
        is_looked_up = self._given == (None, None) and dist.is_available() and dist.is_initialized()
        if is_looked_up and not self._is_compared:
            self._compare_ranks()
            self._is_compared = True
        return place

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None, "_current": None, "num_trained": None}

    def _identity(self) -> dict[str, int]:
        return {"seed": self._seed, "num_samples": self.planner.order.num_drawn}

    def _compare_ranks(self) -> None:
        planner = self.planner
        order = hashlib.sha256(planner.rows(self._epoch).tobytes()).hexdigest()
        mine = (
            planner.costs.key, order, planner.cut, planner.origin, planner.num_microbatches, planner.max_tokens,
            planner.sync, planner.drop_last, *self._identity().items(),
        )  # fmt: skip
        every: list[Any] = [None] * self.num_replicas
        dist.all_gather_object(every, mine)
        other = [r for r, theirs in enumerate(every) if theirs != every[0]]
        if other:
            raise refused(
                f"rank(s) {', '.join(map(str, other[:8]))} have other costs, settings or order than rank 0",
                "make the costs once, SampleCosts.save them and load the file on every rank; a sampler of yours "
                "must draw the same on every rank",
            )
