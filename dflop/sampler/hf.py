"""Hugging Face's Trainer with balanced batches: one import and, where samples have a length, no further argument.

    from dflop.sampler.hf import BalancedTrainer                       # in place of transformers.Trainer

    class BalancedSFTTrainer(BalancedTrainerMixin, SFTTrainer): ...    # any trainer that is built on it

Dataset, collator, workers, accumulation, evaluation and resuming stay the Trainer's own; what changes is which rank and
which microbatch a sample of a global batch is in. The Trainer weighs uneven microbatches by `num_items_in_batch`; where
it cannot count, `count=` does, and without one it is refused: tokens of small microbatches would count more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

from dflop.errors import ConfigError
from dflop.sampler.accumulation import sum_over_ranks
from dflop.sampler.batch_sampler import BalancedBatchSampler
from dflop.sampler.costs_of_samples import SampleCosts
from dflop.sampler.lengths import costs_of_lengths, lengths_of
from dflop.sampler.loss import loss_scale
from dflop.schedule.data_parallel import Sync

Count = Callable[[Any], "int | torch.Tensor"]
if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

_WHERE = "BalancedTrainer"
_UNPADDED = ("DataCollatorWithFlattening",)
_log = logging.getLogger(__name__)


class BalancedTrainerMixin(_Base):
    """Goes before Trainer, or one of its subclasses, in a class; takes what that takes, and more by keyword.

    Args:
        costs: What every sample of `train_dataset` costs, in its order: `SampleCosts`, a file that they were saved in,
            or numbers in any unit. None: what texts of its lengths cost.
        lengths: Tokens of every sample; `auto`: its `length` (`length_column_name`), or how many `input_ids` it has.
        padded: Whether the collator pads; None: it does, unless it is known to flatten.
        sync: Where ranks wait for one another, as in `BalancedBatchSampler`; None: in every microbatch under FSDP and
            DeepSpeed, else once per step.
        count: Tokens that carry loss in a collated batch, where the model's forward takes no `num_items_in_batch`
            and its loss is a mean over them: `lambda batch: (batch["labels"][:, 1:] != -100).sum()`.
    """

    def __init__(
        self,
        *args: Any,
        costs: SampleCosts | Path | str | Sequence[float] | None = None,
        lengths: str | Sequence[int] = "auto",
        padded: bool | None = None,
        sync: Sync | None = None,
        count: Count | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(lengths, str) and lengths != "auto":
            raise ConfigError(f"lengths is `{lengths}`", where=_WHERE, hint='give "auto" or a number per sample')
        self._given_costs, self._given_lengths = costs, lengths
        self._is_padded, self._sync, self._count = padded, sync, count
        self._costs_of: tuple[Any, SampleCosts] | None = None
        self._num_scored = 0
        self.balanced_sampler: BalancedBatchSampler | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(_Resume(self))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The trainer's own loader, its batches dealt out by a `BalancedBatchSampler`.

        Raises:
            ConfigError: what the trainer is configured for would lose samples or weigh them wrongly.
        """
        self._check()
        own = super().get_train_dataloader()
        if isinstance(own.dataset, IterableDataset):
            raise ConfigError(
                "train_dataset is iterable: which samples come next is not known before they are read",
                where=_WHERE,
                hint="give a dataset with __len__ and __getitem__",
            )
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        args, costs, batch_size = self.args, self._sample_costs(), self.get_total_train_batch_size(self.args)
        rest = len(costs) % batch_size
        self.balanced_sampler = BalancedBatchSampler(
            costs,
            batch_size,
            num_microbatches=args.gradient_accumulation_steps,
            sync=self._sync or ("microbatch" if is_sharded else "step"),
            padded=self._pads() if self._is_padded is None else self._is_padded,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last or 0 < rest < args.gradient_accumulation_steps * args.world_size,
        )
        return DataLoader(
            own.dataset,
            batch_sampler=self.balanced_sampler,
            collate_fn=own.collate_fn,
            num_workers=own.num_workers,
            pin_memory=own.pin_memory,
            timeout=own.timeout,
            worker_init_fn=own.worker_init_fn,
            multiprocessing_context=own.multiprocessing_context,
            prefetch_factor=own.prefetch_factor,
            persistent_workers=own.persistent_workers,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The microbatches of a step, and by how many tokens their losses are divided.

        Raises:
            ConfigError: nobody counts them.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._num_scored = 0
        if batches and num_items is None:
            if self._count is None:
                raise ConfigError(
                    f"the forward of {type(self.model).__name__} takes no num_items_in_batch, or batches have no "
                    "`labels`: tokens of small microbatches would count more",
                    where=_WHERE,
                    hint="give count=, e.g. lambda batch: (batch['labels'] != -100).sum(); or compute_loss_func=",
                )
            self._num_scored = sum_over_ranks(sum(int(self._count(batch)) for batch in batches))
        return batches, num_items

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The trainer's own loss; a mean that is not yet divided is weighed by what `count` finds."""
        if self._count is None or not self._num_scored or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        scale = loss_scale(int(self._count(inputs)), self._num_scored, self.args.world_size)
        scale *= self.current_gradient_accumulation_steps  # which the trainer divides by
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (loss * scale, outputs) if return_outputs else loss * scale

    def _sample_costs(self) -> SampleCosts:
        if self._costs_of is None or self._costs_of[0] is not self.train_dataset:
            self._costs_of = self.train_dataset, self._costs_of_dataset()
        return self._costs_of[1]

    def _costs_of_dataset(self) -> SampleCosts:
        given, lengths = self._given_costs, self._given_lengths
        if isinstance(given, SampleCosts):
            return given
        if isinstance(given, Path | str):
            return SampleCosts.load(given)
        if isinstance(lengths, str):
            lengths = lengths_of(self.train_dataset, self.args.length_column_name).tolist()
        return costs_of_lengths(lengths, given)

    def _pads(self) -> bool:
        flattens = type(self.data_collator).__name__ in _UNPADDED or getattr(self.args, "padding_free", False)
        return not flattens

    def _check(self) -> None:
        def refuse(what: str, hint: str) -> None:
            raise ConfigError(what, where=_WHERE, hint=hint)

        if self.args.n_gpu > 1:
            refuse(f"one process would split each batch over {self.args.n_gpu} GPUs", "start it with torchrun")
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            refuse(
                "average_tokens_across_devices is off: tokens of ranks with few of them would count more",
                "leave it on",
            )
        shared = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        if shared > 1:
            refuse(f"{shared} ranks share a batch; batches are dealt to data-parallel ranks", "use plain Trainer")


class BalancedTrainer(BalancedTrainerMixin, Trainer):
    """`transformers.Trainer` whose ranks end their steps together; see `BalancedTrainerMixin` for what it takes."""


class _Resume(TrainerCallback):
    """Takes the sampler to where training stands: with `ignore_data_skip` the trainer begins the epoch anew."""

    def __init__(self, trainer: BalancedTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sampler = self._trainer.balanced_sampler
        if sampler is None or not state.global_step:
            return
        if args.ignore_data_skip:
            sampler.resume(state.global_step)
        else:  # the trainer skips the rest; not all versions of it set the epoch of a batch sampler
            sampler.set_epoch(state.global_step // sampler.steps_per_epoch)
        _log.info("resumed the order of samples at step %d", state.global_step)
