"""The weights of a run's model: those it begins with, and those of its newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from dflop import files
from dflop.config import Config
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError, TrainError
from dflop.jobs.adapter_folder import check_adapters_alone, write_adapters
from dflop.models.build import EncoderStage
from dflop.models.family import Family
from dflop.models.lora import Adapters, WithAdapters, add_adapters, merged
from dflop.models.random_weights import RandomWeights
from dflop.models.weights import WeightFolder, Weights, build_empty, write_folder
from dflop.progress import At, unseen
from dflop.run.directory import RunDir, family_of, tokenizer_of
from dflop.run.model_files import with_kept_tokenizer, write_model_files
from dflop.train import checkpoint_state, manifest
from dflop.train.base import Base, base_problem

MAX_SHARD_BYTES = 5_000_000_000


def full_config(family: Family, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Keyword arguments of the family's config class, with the tokenizer's ids of special tokens."""
    return {**family.hf_config, **family.token_ids(tokenizer.special_ids)}


class FirstModel(NamedTuple):
    """A model before its first step."""

    model: nn.Module
    """Whole, without memory; with the adapters of `train.lora`."""
    weights: Weights
    """Weights that training starts from."""
    adapters: Adapters
    base: Base


def first_weights(config: Config, family: Family, tokenizer: ChatTokenizer) -> FirstModel:
    """The whole model without memory, and its first weights: those of `model.weights`, or random ones.

    A rank that reads its own never holds more, but for one layer's while they are drawn. Random ones do not depend on
    the plan.

    Raises:
        ConfigError: the weights of `model.weights` are another model's, or a target of `train.lora` is no Linear.
    """
    hf_config, dtype = full_config(family, tokenizer), getattr(torch, config.model.dtype)
    model = build_empty(family, hf_config, dtype)
    weights = _weights_of(config, family, tokenizer, model)
    adapters = add_adapters(model, family, config.train.lora)
    base = Base(adapters.base, config.model.weights, config.model.seed)
    return FirstModel(model, WithAdapters(weights, adapters, config.model.seed, dtype), adapters, base)


def _weights_of(config: Config, family: Family, tokenizer: ChatTokenizer, model: nn.Module) -> Weights:
    if config.model.weights is None:
        # Units are drawn in a model of their own, as stages are cut out of the other.
        empty = build_empty(family, full_config(family, tokenizer), getattr(torch, config.model.dtype))
        return RandomWeights(empty, config.model.seed)
    num_rows = cast(Any, model).get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the weights have room for {num_rows}",
            where="model.weights",
            hint="use the tokenizer.json of the weights",
        )
    return WeightFolder(config.model.weights, model)


@dataclass(frozen=True, slots=True)
class Trained:
    """A run's model as trained so far."""

    config: Config
    """With the tokenizer and chat template that the run kept."""
    family: Family
    tokenizer: ChatTokenizer
    hf_config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    """Every parameter by global name, in the model's type; adapters are merged into those of their base, or alone."""
    num_steps: int
    first: FirstModel | None = None
    """What it was before, of a run that trains adapters."""


def read_trained(
    run: RunDir, progress: Callable[[str], None], at: At = unseen, *, merges: bool = True, is_best: bool = False,
    is_average: bool = False,
) -> Trained:  # fmt: skip
    """The model of a run's newest checkpoint, or of the one with the lowest validation loss.

    Args:
        run: Any.
        progress: Receives a line per thing that a person has to know.
        at: Receives how far reading is.
        merges: Whether adapters are merged into their base; otherwise what the checkpoint holds is read alone.
        is_best: Whether the checkpoint is the one with the lowest validation loss.
        is_average: Whether to read the average over steps in place of the weights.

    Raises:
        ConfigError: the run has no checkpoint, does not keep the best one, or no average.
        TrainError: no checkpoint can be read, or it has adapters of another base.
    """
    meta, damaged = manifest.newest_sound(run.checkpoints)
    if is_best and meta is not None:
        if manifest.BEST not in meta:
            hint = "validation.keep_best: true and validation.num_samples keep it in training"
            raise ConfigError("the run keeps no checkpoint as its best", where=str(run.config_file), hint=hint)
        meta, damaged = manifest.newest_sound(run.checkpoints, [meta[manifest.BEST]])
    for problem in damaged:
        progress(f"skipped damaged checkpoint: {problem}")
    if meta is None and damaged:
        raise TrainError("every checkpoint is damaged", where=str(run.checkpoints))
    if meta is None:
        hint = "training writes one every train.checkpoint_every"
        raise ConfigError("the run has no checkpoint yet", where=str(run.path), hint=hint)
    config, num_steps = with_kept_tokenizer(run.config(), run), int(meta["next_step"])
    progress(f"checkpoint of {num_steps} steps of {config.train.num_steps}")
    tokenizer = tokenizer_of(config)
    family = family_of(config, tokenizer.vocab_size)
    weights = checkpoint_state.read_model(run.checkpoints / meta["name"], at, is_average=is_average)
    trained = {module.module for module in run.plan().modules}
    untrained = tuple(module for module in family.modules if module not in trained)
    if untrained:
        progress(f"not trained, as the data has no items for it: {', '.join(untrained)}")
    has_adapters, first = config.train.lora is not None, None
    if untrained or has_adapters:
        first = first_weights(config, family, tokenizer)
        described = first.base.described([first.base.digests()]) if has_adapters else {}
        if problem := base_problem(meta, described):
            raise TrainError(problem, where=str(run.checkpoints / meta["name"]), hint="restore the base")
    if first is not None and merges:
        names = {name for module in untrained for name in EncoderStage(first.model, family.towers[module]).names}
        weights |= {name: first.weights.read(name) for name in sorted(names | first.base.names)}
        weights = merged(weights, first.adapters)
    dtype = getattr(torch, config.model.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    hf_config = full_config(family, tokenizer)
    return Trained(config, family, tokenizer, hf_config, weights, num_steps, first if has_adapters else None)


def export_run(
    run: RunDir,
    out: Path,
    progress: Callable[[str], None],
    at: At = unseen,
    *,
    merges: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    is_best: bool = False,
    is_average: bool = False,
) -> int:
    """Write the model as trained so far, and return for how many steps; the folder appears when it is complete.

    Args:
        run: Any.
        out: Folder to write.
        progress: Receives a line per thing that a person has to know.
        at: Receives how far reading and writing are.
        merges: Whether adapters are merged into their base; otherwise the folder is one of `peft`, if there are any.
        max_shard_bytes: A larger model becomes several files.
        is_best: As for `read_trained`.
        is_average: As for `read_trained`.

    Raises:
        ConfigError: the run has no checkpoint, does not keep what is asked for, `out` has content, or a folder of
            `peft` cannot hold what was trained.
        TrainError: no checkpoint can be read, or the folder cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("already exists", where=str(out), hint="choose a new folder")
    if alone := run.config().train.lora is not None and not merges:
        check_adapters_alone(run.config(), run.plan())
    of = read_trained(run, progress, at, merges=not alone, is_best=is_best, is_average=is_average)
    temporary = files.tmp_path(out)
    try:
        temporary.mkdir(parents=True)
        if alone and of.first is not None:
            write_adapters(of.config, of.weights, of.first.model, of.first.adapters, temporary)
        else:
            write_folder(of.family, of.hf_config, of.weights, temporary, max_shard_bytes=max_shard_bytes, at=at)
        notes = write_model_files(run, of.config, of.family, of.tokenizer, temporary)
        if out.exists():
            out.rmdir()
        os.replace(temporary, out)
    except OSError as error:
        raise TrainError(f"cannot write the model: {error.strerror or error}", where=str(out)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for note in notes:
        progress(note)
    return of.num_steps
