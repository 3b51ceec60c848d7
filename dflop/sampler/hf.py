"""Hugging Face's Trainer with balanced batches: one import and, where samples have a length, no further argument.

    from dflop.sampler.hf import BalancedTrainer                       # in place of transformers.Trainer

    class BalancedSFTTrainer(BalancedTrainerMixin, SFTTrainer): ...    # any trainer that is built on it

Dataset, collator, workers, accumulation, evaluation and resuming stay the Trainer's own; what changes is which rank and
which microbatch a sample of a global batch is in. A random order is drawn anew; any other one is followed, batch by
batch. The Trainer weighs uneven microbatches by `num_items_in_batch`; where it cannot count, `count=` does, and without
one it is refused: tokens of small microbatches would count more.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from dflop.balance.packing import IGNORED, Packing, PackingCollator, num_predicted
from dflop.sampler.accumulation import loss_scale, sum_over_ranks
from dflop.sampler.batch_sampler import BalancedBatchSampler
from dflop.sampler.costs_of_samples import SampleCosts
from dflop.sampler.estimate import Gain
from dflop.sampler.followed import FollowedOrder, order_of, refused
from dflop.sampler.lengths import costs_of_dataset, costs_of_lengths, lengths_of
from dflop.schedule.data_parallel import Sync
from dflop.simulate.jit import IS_COMPILED

Count = Callable[[Any], "int | torch.Tensor"]
if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

_KEPT = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""Arguments of a trainer's own loader."""
_UNPADDED = {"DataCollatorWithFlattening"}
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
        window: Global batches of the random order whose samples are sorted together, as in `BalancedBatchSampler`.
        packing: `exact` packs the samples of a microbatch into one row, each computed as if it were alone, rope
            positions of images, windows and layers with a state included; `collate` is called sample by sample.
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
        window: int = 1,
        packing: str | None = None,
        count: Count | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(lengths, str) and lengths != "auto":
            raise refused(f"lengths is `{lengths}`", 'give "auto" or a number per sample')
        if packing not in (None, "exact"):
            raise refused(f"packing is `{packing}`", 'give "exact", or leave it out to pad')
        self._given_costs, self._given_lengths = costs, lengths
        self._packs = packing is not None
        self._is_padded, self._sync, self._window, self._count = False if packing else padded, sync, window, count
        self._packing: Packing | None = None
        self._costs_of: tuple[Any, SampleCosts] | None = None
        self._scored: tuple[list[int], int] = [], 0
        self._checkpoint: Any = None
        self._gain: Gain | None = None
        self.balanced_sampler: BalancedBatchSampler | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(BalancedOrder())

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, which may resume with another global batch size: no sample is left out or repeated."""
        is_last = resume_from_checkpoint is True
        self._checkpoint = get_last_checkpoint(self.args.output_dir) if is_last else resume_from_checkpoint
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The trainer's own loader, its batches dealt out by a `BalancedBatchSampler`.

        Raises:
            ConfigError: what the trainer is configured for would lose samples or weigh them wrongly.
        """
        self._check()
        own = self._own_loader()
        if isinstance(own.dataset, IterableDataset):
            raise refused(
                "train_dataset is iterable: which samples come next is not known before they are read",
                "give a dataset with __len__ and __getitem__",
            )
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        args, costs, source = self.args, self._sample_costs(), order_of(own, self._train_batch_size)
        seed = args.seed if args.data_seed is None else args.data_seed
        self.balanced_sampler = sampler = BalancedBatchSampler(
            costs,
            self.get_total_train_batch_size(args),
            num_microbatches=args.gradient_accumulation_steps,
            sync=self._sync or ("microbatch" if is_sharded else "step"),
            padded=self._pads() if self._is_padded is None else self._is_padded,
            seed=seed,
            drop_last=args.dataloader_drop_last,
            window=self._window,
            order=None if source is None else FollowedOrder(source, costs, seed, self._train_batch_size),
        )
        saved = self._saved_order()
        if saved and (saved["num_samples"] == sampler.planner.order.num_drawn or not args.ignore_data_skip):
            sampler.load_state_dict(saved)  # with that, another dataset begins where the trainer says
        sampler.num_trained = lambda: self.state.global_step
        self._gain = Gain(sampler.planner)
        kept = {name: getattr(own, name) for name in _KEPT}
        if self._packs:
            self._packing = self._packing or Packing(self.model)  # before anything wraps the model
            self._count = self._count or num_predicted
            kept["collate_fn"] = PackingCollator(own.collate_fn)
        return DataLoader(own.dataset, batch_sampler=sampler, **kept)

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """The trainer's own numbers of epochs and steps; those that are left where global batches had another size."""
        values = list(super().set_initial_training_values(args, dataloader, *more))
        sampler = self.balanced_sampler
        if sampler is not None and sampler.planner.is_shifted and args.max_steps <= 0:
            epoch = sampler.planner.origin.epoch + 1
            left = math.ceil((args.num_train_epochs - epoch) * sampler.steps_per_epoch)
            num_steps = max(sampler.planner.origin.step, sampler.planner.first_step(epoch) + left)
            values[0], values[-1] = -(-num_steps // sampler.steps_per_epoch), num_steps
        return tuple(values)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The microbatches of a step, and by how many tokens their losses are divided.

        Raises:
            ConfigError: they are not counted.
        """
        is_filler = self._is_filler()
        drawn = zip(is_filler, epoch_iterator, strict=False)
        without = (_unscored(b) if f and self._count is None else b for f, b in drawn)
        batches, num_items = super().get_batch_samples(without, num_batches, device)
        self._scored = [], 0
        if batches and num_items is None:
            if self._count is None:
                raise refused(
                    f"the forward of {type(self.model).__name__} takes no num_items_in_batch, or batches have no "
                    "`labels`: tokens of small microbatches would count more",
                    "give count=, e.g. lambda batch: (batch['labels'] != -100).sum(); or compute_loss_func=",
                )
            counts = [0 if f else int(self._count(batch)) for batch, f in zip(batches, is_filler, strict=False)]
            self._scored = counts, sum_over_ranks(sum(counts))
        return batches, num_items

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The trainer's own; packed samples are computed each by itself, in the backward pass, too."""
        with contextlib.nullcontext() if self._packing is None else self._packing.of(inputs):
            return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The trainer's own loss; a mean that is not yet divided is weighed by what `count` finds."""
        counts, num_scored = self._scored
        if not counts or not num_scored or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        scale = loss_scale(counts.pop(0), num_scored, self.args.world_size)
        scale *= self.current_gradient_accumulation_steps  # which the trainer divides by
        found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (found[0] * scale, found[1]) if return_outputs else found * scale

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The trainer's own, with what balancing does to the steps since the last time."""
        if self._gain is not None:
            if "loss" in logs:
                logs |= self._gain.since_last()
            if "train_runtime" in logs and self.is_world_process_zero():
                _tell(f"balanced {self._gain.saved()}, by the costs")
        super().log(logs, *args, **kwargs)

    def _is_filler(self) -> list[bool]:
        """Per microbatch of the step that begins, whether its sample counts on another rank."""
        sampler = self.balanced_sampler
        if sampler is None:  # somebody's own loader
            return [False] * self.args.gradient_accumulation_steps
        plan = sampler.planned(self.state.global_step)
        if self._gain is not None:
            self._gain.add(plan)
        return plan.is_filler(sampler.rank)

    def _own_loader(self) -> DataLoader[Any]:
        """As the trainer makes it, before Accelerate shards it: with the sampler as it is."""
        of_accelerator = vars(self.accelerator)
        of_accelerator["prepare"] = lambda loader, *args, **kwargs: loader  # hides the method
        try:
            return super().get_train_dataloader()
        finally:
            del of_accelerator["prepare"]

    def _saved_order(self) -> dict[str, int]:
        """What `BalancedOrder` put into the checkpoint; nothing where there is none, or it was made without."""
        file = Path(self._checkpoint or "") / TRAINER_STATE_NAME
        if not self._checkpoint or not file.is_file():
            return {}
        saved = (TrainerState.load_from_json(str(file)).stateful_callbacks or {}).get(BalancedOrder.__name__)
        if not saved and self.is_world_process_zero():
            _tell("the checkpoint was made without dflop: samples of its epoch may be left out or repeated")
        return saved["attributes"]["saved"] if saved else {}

    def _sample_costs(self) -> SampleCosts:
        if self._costs_of is None or self._costs_of[0] is not self.train_dataset:
            self._costs_of = self.train_dataset, self._costs_of_dataset()
        return self._costs_of[1]

    def _costs_of_dataset(self) -> SampleCosts:
        given, lengths, column = self._given_costs, self._given_lengths, self.args.length_column_name
        if isinstance(given, SampleCosts):
            return given
        if isinstance(given, Path | str):
            return SampleCosts.load(given)
        if isinstance(lengths, str):
            if given is None:
                return costs_of_dataset(self.train_dataset, column)
            lengths = lengths_of(self.train_dataset, column).tolist()
        return costs_of_lengths(lengths, given)

    def _pads(self) -> bool:
        owners = (self, self.args, self.data_collator, getattr(self, "template", None))  # TRL's packing, ms-swift's
        kinds = {kind.__name__ for kind in type(self.data_collator).__mro__}
        return not (kinds & _UNPADDED or any(getattr(owner, "padding_free", False) for owner in owners))

    def _check(self) -> None:
        if self.args.n_gpu > 1:
            raise refused(f"one process would split each batch over {self.args.n_gpu} GPUs", "start it with torchrun")
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            raise refused(
                "average_tokens_across_devices is off: tokens of ranks with few of them would count more", "leave it on"
            )
        if (shared := self.get_tp_size() * self.get_cp_size() * self.get_sp_size()) > 1:
            raise refused(
                f"{shared} ranks share a batch; batches are dealt to data-parallel ranks", "use plain Trainer"
            )


class BalancedTrainer(BalancedTrainerMixin, Trainer):
    """`transformers.Trainer` whose ranks end their steps together; see `BalancedTrainerMixin` for what it takes."""


class BalancedOrder(TrainerCallback, ExportableState):
    """Puts the place in the order into checkpoints, and says at the start what balancing does."""

    def __init__(self) -> None:
        self.saved: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        sampler = getattr(train_dataloader, "batch_sampler", None)
        if not isinstance(sampler, BalancedBatchSampler):
            _tell("batches are not balanced: get_train_dataloader is overridden without a call of super()")
            return
        self.saved = sampler.state_dict(state.global_step)
        if state.is_world_process_zero and state.global_step < state.max_steps:
            _tell(sampler_line(sampler, state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if isinstance(sampler := getattr(train_dataloader, "batch_sampler", None), BalancedBatchSampler):
            self.saved = sampler.state_dict(state.global_step)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.saved}}


def sampler_line(sampler: BalancedBatchSampler, step: int) -> str:
    """What is balanced, and what that should save."""
    planner = sampler.planner
    order = planner.order.name if isinstance(planner.order, FollowedOrder) else "random order"
    window = f", windows of {planner.cut.window}" if planner.cut.window > 1 else ""
    slow = "" if IS_COMPILED else "; numba makes plans faster: pip install 'dflop[fast]'"
    return (
        f"balancing {planner.cut.global_batch_size} samples a step over {sampler.num_replicas} rank(s) x "
        f"{sampler.num_microbatches} microbatch(es), {order}{window}: expected {Gain(planner).expected(step)}{slow}"
    )


def _unscored(batch: Any) -> Any:
    """A microbatch whose sample is trained elsewhere, without a token that carries loss."""
    for name in ("labels", "shift_labels"):
        if name in batch:
            batch[name] = torch.full_like(batch[name], IGNORED)
    return batch


def _tell(line: str) -> None:
    """To be seen once, whatever a program shows of its libraries' logs."""
    _log.log(logging.INFO if _log.isEnabledFor(logging.INFO) else logging.WARNING, line)
