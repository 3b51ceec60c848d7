"""A run's newest checkpoint as a Hugging Face folder, in one process without a device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from dflop import files
from dflop.config import Config
from dflop.errors import ConfigError, TrainError
from dflop.jobs.configured_model import full_config, untrained_weights
from dflop.models.weights import write_folder
from dflop.run.directory import RunDir, family_of, tokenizer_of
from dflop.train import checkpoint_state, manifest

MAX_SHARD_BYTES = 5_000_000_000


def export_run(run: RunDir, out: Path, progress: Callable[[str], None], max_shard_bytes: int = MAX_SHARD_BYTES) -> int:
    """Write the model as trained so far, and return for how many steps; the folder appears when it is complete.

    Raises:
        ConfigError: the run has no checkpoint, or `out` has content.
        TrainError: no checkpoint can be read, or the folder cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("already exists", where=str(out), hint="choose a new folder")
    meta, damaged = manifest.newest_sound(run.checkpoints)
    for problem in damaged:
        progress(f"skipped damaged checkpoint: {problem}")
    if meta is None and damaged:
        raise TrainError("every checkpoint is damaged", where=str(run.checkpoints))
    if meta is None:
        hint = "training writes one every train.checkpoint_every"
        raise ConfigError("the run has no checkpoint yet", where=str(run.path), hint=hint)
    config, step, temporary = run.config(), int(meta["next_step"]), files.tmp_path(out)
    progress(f"checkpoint of {step} steps of {config.train.num_steps}")
    weights = checkpoint_state.read_model(run.checkpoints / meta["name"])
    trained = {module.module for module in run.plan().modules}
    try:
        left_out = _write(config, weights, trained, temporary, max_shard_bytes)
        if out.exists():
            out.rmdir()
        os.replace(temporary, out)
    except OSError as error:
        raise TrainError(f"cannot write the model: {error.strerror or error}", where=str(out)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if left_out:
        progress(f"not trained, as the data has no items for it: {', '.join(left_out)}")
    return step


def _write(
    config: Config, weights: dict[str, torch.Tensor], trained: Collection[str], folder: Path, max_shard_bytes: int
) -> list[str]:
    """Write the folder; returns the modules that nobody trained, whose weights are those the run began with."""
    tokenizer = tokenizer_of(config)
    family = family_of(config, tokenizer.vocab_size)
    left_out = [module for module in family.modules if module not in trained]
    weights |= untrained_weights(config, family, tokenizer, left_out)
    dtype = getattr(torch, config.model.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    folder.mkdir(parents=True)
    write_folder(family, full_config(family, tokenizer), weights, folder, max_shard_bytes=max_shard_bytes)
    shutil.copyfile(config.dataset.tokenizer, folder / "tokenizer.json")
    template = Path(config.dataset.chat_template)
    if template.is_file():
        shutil.copyfile(template, folder / template.name)
    return left_out
