"""Samples packed into one row of a model of transformers, each computed as if it were alone.

`PackingCollator` collates samples one by one with the trainer's own collator and concatenates them without padding.
Within `Packing.of(batch)` the model's text layers take the project's packed attention, windows and chunks included,
each sample has the rope positions that the model gives it alone, and layers that carry a state run sample by sample.
Towers cut images apart by themselves. Outside of it the model is as it was, so evaluation may pad.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dflop.errors import ConfigError
from dflop.models.generic.classes import find_decoder
from dflop.models.generic.packed import NAME, Holder, Samples, prepare
from dflop.models.generic.reach import UnknownArgument, read_reaches

SAMPLES = "packed_samples"
"""Entry of a packed batch: tokens and, by name, entries of each other tensor, per sample."""
IGNORED = -100
"""Label of a token that carries no loss."""
WHERE = "packing"
_TOKENS = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")


class PackingCollator:
    """In place of a collator that pads.

    Args:
        collate: The trainer's own, called with one sample at a time.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """One row of all samples, `input_ids` `[1, tokens]`; media of all samples are concatenated.

        Raises:
            ConfigError: the collator makes something that cannot be concatenated.
        """
        singles = [self._single(sample) for sample in samples]
        lengths = [int(single["input_ids"].shape[1]) for single in singles]
        packed: dict[str, Any] = {}
        counts: dict[str, list[int]] = {}
        for name in dict.fromkeys(name for single in singles for name in single):
            parts = [single[name] for single in singles if name in single]
            if name in _TOKENS:
                if len(parts) < len(singles):
                    raise ConfigError(f"some samples have `{name}` and some have not", where=WHERE)
                packed[name] = torch.cat(parts, dim=1)
            else:
                packed[name] = torch.cat(parts)
                counts[name] = [len(single[name]) if name in single else 0 for single in singles]
        return {**packed, SAMPLES: {"lengths": lengths, **counts}}

    def _single(self, sample: Any) -> dict[str, torch.Tensor]:
        """One sample without padding; its first token, which nothing predicts, carries no loss."""
        found = {name: value for name, value in self.collate([sample]).items() if value is not None}
        if strange := [name for name, value in found.items() if not isinstance(value, torch.Tensor)]:
            raise ConfigError(
                f"the collator makes `{strange[0]}`, a {type(found[strange[0]]).__name__}", where=WHERE,
                hint="packing takes tensors; leave it out of the batch",
            )  # fmt: skip
        mask = found.pop("attention_mask", torch.ones_like(found["input_ids"]))[0].bool()
        found.pop("position_ids", None)
        found |= {name: found[name][:, mask] for name in _TOKENS if name in found}
        if "labels" in found:
            found["labels"] = found["labels"].clone()
            found["labels"][:, 0] = IGNORED
        return found


class Packing:
    """Lets a model compute packed samples each by itself.

    Args:
        model: Of transformers, before DDP or FSDP wrap it.

    Raises:
        ConfigError: its layers see keys by a rule that packing does not know.
    """

    def __init__(self, model: Any) -> None:
        try:
            path, decoder = find_decoder(model)
            above, _, name = path.rpartition(".")
            self._shell = model.get_submodule(above)
            reaches = read_reaches(self._shell, name, "")
        except (LookupError, UnknownArgument) as error:
            raise _refused(model, str(error)) from error
        if set(inspect.signature(self._shell.forward).parameters) & {"token_type_ids"}:
            raise _refused(model, "tokens of an image see each other")
        self._config, self._holder = decoder.config, Holder()
        own = self._config._attn_implementation
        prepare(dict(enumerate(decoder.layers)), reaches, self._config, self._holder)
        self._config._attn_implementation = own

    @contextlib.contextmanager
    def of(self, batch: dict[str, Any]) -> Iterator[None]:
        """Within it, its backward pass included, the model computes this batch; `batch` gets what that takes.

        Args:
            batch: As `PackingCollator` made it, on any device.
        """
        samples = batch.pop(SAMPLES)
        batch["position_ids"] = self._positions(batch, samples)
        batch["use_cache"] = False  # a cache would carry a layer's state from sample to sample
        own = self._config._attn_implementation
        self._config._attn_implementation, self._holder.samples = NAME, Samples(samples["lengths"], _device_of(batch))
        try:
            yield
        finally:
            self._config._attn_implementation, self._holder.samples = own, None

    def _positions(self, batch: Mapping[str, Any], samples: Mapping[str, list[int]]) -> torch.Tensor:
        """`[1, tokens]`, or `[axes, 1, tokens]` where the model has its own rule."""
        lengths, device = samples["lengths"], batch["input_ids"].device
        counted = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        rule = getattr(self._shell, "get_rope_index", None)
        if rule is None:
            return counted
        takes = inspect.signature(rule).parameters
        needed = {name for name, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        cut = {name: batch[name].split(lengths, dim=1) for name in _TOKENS if name in batch and name in takes}
        cut |= {name: batch[name].split(counts) for name, counts in samples.items() if name in takes}
        found = []
        for index, own in enumerate(counted[0].split(lengths)):
            given = {name: parts[index] for name, parts in cut.items() if len(parts[index])}
            has_media = any(name.endswith("grid_thw") for name in given)
            by_rule = has_media and needed <= given.keys()  # else the model counts, too
            found.append(rule(**given)[0][:, 0] if by_rule else own.expand(3, -1))
        return torch.cat(found, dim=-1)[:, None]


def num_predicted(batch: Mapping[str, Any]) -> torch.Tensor:
    """Tokens of a batch that carry loss where a loss shifts labels by one."""
    found: torch.Tensor = (batch["labels"][:, 1:] != IGNORED).sum()
    return found


def _device_of(batch: Mapping[str, Any]) -> torch.device:
    device: torch.device = batch["input_ids"].device
    return device


def _refused(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"samples of {type(model).__name__} cannot be packed: {why}", where=WHERE, hint="train it with padding"
    )
