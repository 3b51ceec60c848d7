"""The batch sampler: balanced microbatches of this rank for `torch.utils.data.DataLoader(batch_sampler=...)`.

Resuming goes by the number of optimizer steps that were trained, which only the trainer knows: a loader with workers
has drawn further than that. `resume(step)` before the first batch is all there is to it; how many ranks or
microbatches there were before does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from dflop.errors import ConfigError, did_you_mean
from dflop.sampler.costs import SampleCosts, sample_costs
from dflop.sampler.plans import BatchPlan, Planner, warm_up
from dflop.sampler.steps import Step
from dflop.schedule.data_parallel import Sync

SYNCS = ("step", "microbatch")


class BalancedBatchSampler(Sampler[list[int]]):
    """Microbatches of one rank: same samples per optimizer step as any plan, dealt out so that ranks end together.

    Every rank makes the same plan by itself. Each sample comes once per epoch; every rank has the same number of
    microbatches in a step and at least one sample in each. An epoch that was iterated to its end is followed by the
    next one, with or without `set_epoch`.

    When torch.distributed is initialised and neither `num_replicas` nor `rank` is given, making a sampler is a
    collective call: ranks compare their costs once, since ranks that plan from different ones would lose samples.

    Args:
        costs: Of every sample; a plain sequence is taken as lengths in tokens.
        global_batch_size: Samples per optimizer step, over all ranks and microbatches.
        num_microbatches: Per rank and step, as trainers with a constant gradient accumulation need it; 1 when neither
            this nor `max_tokens` is given. No microbatch is over 1.25 times the average in tokens, if samples allow it.
        max_tokens: Instead: no microbatch has more, and there are as many of them as that takes, which differs from
            step to step. For loops over `steps()`. A longer sample has a microbatch to itself.
        num_replicas: Data-parallel ranks; None: as torch.distributed, or WORLD_SIZE, says.
        rank: This one among them; None: as torch.distributed, or RANK, says.
        sync: Where ranks wait for one another: once per `step` (DDP under `no_sync`, or no accumulation) or in every
            `microbatch` (FSDP, ZeRO-3).
        padded: Whether the collator pads samples to the longest of their microbatch: then samples of similar length
            share one. False: it puts them one after the other.
        seed: Of the order.
        drop_last: Leave out the samples beyond the last full global batch of an epoch; other ones in every epoch.
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
        ahead: int = 2,
    ) -> None:
        is_collective = num_replicas is None and rank is None and dist.is_available() and dist.is_initialized()
        self.rank, self.num_replicas = _place(rank, num_replicas)
        numbers = {
            "global_batch_size": global_batch_size, "num_microbatches": num_microbatches, "max_tokens": max_tokens,
        }  # fmt: skip
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}, must be positive", where="BalancedBatchSampler")
        if num_microbatches is not None and max_tokens is not None:
            raise ConfigError(
                "num_microbatches and max_tokens are both given",
                where="BalancedBatchSampler",
                hint="a constant number of microbatches, or as many as fit into max_tokens",
            )
        if sync not in SYNCS:
            raise ConfigError(f"unknown sync `{sync}`", where="BalancedBatchSampler", hint=did_you_mean(sync, SYNCS))
        if not isinstance(costs, SampleCosts):
            costs = sample_costs(costs)
        self._planner = Planner(
            costs,
            global_batch_size,
            num_replicas=self.num_replicas,
            num_microbatches=num_microbatches or (None if max_tokens else 1),
            max_tokens=max_tokens,
            sync=sync,
            padded=padded,
            seed=seed,
            drop_last=drop_last,
        )
        self._ahead = ahead
        self._epoch = self._first_in_epoch = 0
        if is_collective:
            self._compare_ranks()
        warm_up(sync)

    @property
    def costs(self) -> SampleCosts:
        return self._planner.costs

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self._planner.steps_per_epoch

    @property
    def num_microbatches(self) -> int | None:
        """Per rank and step; None where it differs from step to step."""
        return self._planner.num_microbatches

    def __len__(self) -> int:
        """Microbatches of this rank in a whole epoch."""
        if self.num_microbatches is None:
            raise TypeError("with max_tokens the number of microbatches is not known in advance; see steps_per_epoch")
        return self.steps_per_epoch * self.num_microbatches

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch
        first = epoch * self.steps_per_epoch
        for plan in self._planner.plans(first + self._first_in_epoch, first + self.steps_per_epoch, self._ahead):
            yield from plan.rank(self.rank)
        if self._epoch == epoch:
            self._epoch, self._first_in_epoch = epoch + 1, 0

    def steps(self, loader: Iterable[Any] | None = None, *, until: int | None = None) -> Iterator[Step]:
        """Optimizer steps from where the sampler stands to the end of the epoch.

        Args:
            loader: The `DataLoader` of this sampler; None: the steps' microbatches are positions in the dataset.
            until: Go on over epochs until so many steps, counted from the first of all, are trained.
        """
        while True:
            step = self._epoch * self.steps_per_epoch + self._first_in_epoch
            end = (self._epoch + 1) * self.steps_per_epoch
            end = end if until is None else min(end, until)
            batches = None if loader is None else iter(loader)
            for plan in self._planner.plans(step, end, self._ahead if loader is None else 0):
                found = Step(plan, self.rank, self.num_replicas, batches)
                yield found
                found.skip_rest()
            self.resume(max(step, end))
            if until is None or end >= until:
                return

    def planned(self, step: int) -> BatchPlan:
        """The plan of a step (from 0, counted over epochs): who trains on what, and how long that should take."""
        return self._planner.plan(step)

    def step(self, number: int) -> Step:
        """A step (from 0, counted over epochs) for trainers that draw its microbatches themselves."""
        return Step(self.planned(number), self.rank, self.num_replicas, None)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (from 0); where the sampler was resumed within it, to that place."""
        if epoch != self._epoch:
            self._epoch, self._first_in_epoch = epoch, 0

    def resume(self, step: int) -> None:
        """Go to an optimizer step: the number of those that were trained, over all epochs.

        Hugging Face's Trainer skips what was trained by itself: leave it to that, or set `ignore_data_skip`. Lightning
        does not: call this with the checkpoint's global step before `fit`.

        Raises:
            ConfigError: the number is negative.
        """
        if step < 0:
            raise ConfigError(f"step {step} is negative", where="BalancedBatchSampler.resume")
        self._epoch, self._first_in_epoch = divmod(step, self.steps_per_epoch)

    def state_dict(self, step: int) -> dict[str, int]:
        """State as a few integers, for a checkpoint.

        Args:
            step: Optimizer steps trained so far, over all epochs. The sampler cannot know: it is ahead of training.
        """
        return {"step": step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a checkpoint was made, with any number of ranks and microbatches.

        Raises:
            ConfigError: the state is of another order of samples.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise ConfigError(
                    f"{name} is {value}, the checkpoint was made with {state[name]}",
                    where="BalancedBatchSampler.load_state_dict",
                    hint="the same samples in the same order need the same value",
                )
        self.resume(state["step"])

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself: Lightning and Accelerate look here for whoever has `set_epoch`."""
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
        raise ConfigError(
            "these batches are this rank's own and differ in size; they must not be sharded again",
            where="BalancedBatchSampler",
            hint="leave the loader out of accelerator.prepare; Lightning: Trainer(use_distributed_sampler=False)",
        )

    def _identity(self) -> dict[str, int]:
        planner = self._planner
        return {
            "seed": planner.seed,
            "global_batch_size": planner.global_batch_size,
            "num_samples": len(planner.costs),
            "drop_last": int(planner.drop_last),
        }

    def _compare_ranks(self) -> None:
        planner = self._planner
        mine = (
            planner.costs.key,
            planner.num_microbatches,
            planner.max_tokens,
            planner.sync,
            *self._identity().items(),
        )
        every: list[Any] = [None] * self.num_replicas
        dist.all_gather_object(every, mine)
        other = [r for r, theirs in enumerate(every) if theirs != every[0]]
        if other:
            raise ConfigError(
                f"rank(s) {', '.join(map(str, other[:8]))} have other costs or settings than rank 0",
                where="BalancedBatchSampler",
                hint="make the costs once, SampleCosts.save them and load the file on every rank",
            )


def _place(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """(rank, number of ranks), as given or as the surroundings say."""
    if dist.is_available() and dist.is_initialized():
        found = dist.get_rank(), dist.get_world_size()
    else:
        found = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rank, num_replicas = found[0] if rank is None else rank, found[1] if num_replicas is None else num_replicas
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"rank {rank} is none of {num_replicas} rank(s)", where="BalancedBatchSampler")
    return rank, num_replicas
