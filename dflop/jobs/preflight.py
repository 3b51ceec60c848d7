"""Everything that can be wrong with a configuration, found in seconds: before Prefect, torch or a job starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from dflop.config import Config
from dflop.errors import ConfigError, did_you_mean
from dflop.jobs.rundir import dataset_ref, trainable_of
from dflop.jobs.scalars import check_tensorboard
from dflop.jobs.steps import stages_of
from dflop.models.family import Family
from dflop.plan.candidates import check_processes
from dflop.records import LLM

_SCAN_BYTES = 64 << 20


def preflight(config: Config, config_file: Path) -> None:
    """Check what a run will need.

    Args:
        config: The validated configuration.
        config_file: Named in the errors.

    Raises:
        ConfigError: unknown family, module or media limit, missing dataset, no Slurm or TensorBoard here, hardware
            label missing.
        InfeasiblePlanError: only layout `split` is allowed and there are fewer processes than modules the data needs.
    """
    family = trainable_of(config)
    _check_frozen(config.model.frozen, family, f"{config_file}: model.frozen")
    _check_stages(config, family, config_file)
    _check_weights(config, config_file)
    _check_dataset(config, config_file)
    _check_cluster(config, config_file)
    check_tensorboard(config, str(config_file))
    if config.plan.layouts == ("split",):
        check_processes(modules_named(family, config), config.cluster.spec().num_processes)


def modules_named(family: Family, config: Config) -> tuple[str, ...]:
    """Modules that the annotations bring work to, as far as a look tells: media keys in the first 64 MiB of JSON.

    Of other formats only the LLM is sure; the planner knows all of them once the dataset is profiled.
    """
    annotations = config.dataset.annotations
    if config.dataset.demo and not annotations.is_file():
        return family.modules
    if not annotations.is_file() or annotations.suffix not in (".json", ".jsonl"):
        return (LLM,)
    with open(annotations, "rb") as f:
        content = f.read(_SCAN_BYTES)
    kinds = [kind for kind in family.media_tokens if f'"{kind}'.encode() in content]
    placed = {family.place(k, width_px=224, height_px=224, num_frames=8, duration_s=1.0).module for k in kinds}
    return tuple(m for m in family.modules if m == LLM or m in placed)


def _check_frozen(frozen: Sequence[str], family: Family, where: str) -> None:
    for name in frozen:
        if name not in family.freezable:
            raise ConfigError(f"unknown module `{name}`", where=where, hint=did_you_mean(name, family.freezable))
    if set(frozen) >= set(family.modules):
        raise ConfigError("every module is frozen: there is nothing to train", where=where)


def _check_stages(config: Config, family: Family, config_file: Path) -> None:
    names = [stage.name for stage in config.stages]
    for index, stage in enumerate(config.stages):
        where, is_last = f"{config_file}: stages.{index}", index == len(names) - 1
        if stage.name in names[:index]:
            raise ConfigError(f"two stages are named `{stage.name}`", where=f"{where}.name")
        if is_last and stage.num_steps is not None:
            raise ConfigError(
                "the last stage takes the steps that are left",
                where=f"{where}.num_steps",
                hint="leave it out; `train.num_steps` says how many there are in all",
            )
        if not is_last and stage.num_steps is None:
            raise ConfigError(
                f"stage `{stage.name}` does not say how many steps it has",
                where=f"{where}.num_steps",
                hint="only the last stage takes what is left",
            )
        _check_frozen(stage.frozen, family, f"{where}.frozen")
    if config.stages and stages_of(config)[-1].num_steps < 1:
        raise ConfigError(
            f"no step is left of {config.train.num_steps} for the last stage",
            where=f"{config_file}: train.num_steps",
            hint=f"more than {stages_of(config)[-1].first_step}, which the stages before it take",
        )


def _check_weights(config: Config, config_file: Path) -> None:
    folder = config.model.weights
    names = ("model.safetensors", "model.safetensors.index.json")
    if folder is not None and not any((folder / name).is_file() for name in names):
        raise ConfigError(
            f"no weights in `{folder}`",
            where=f"{config_file}: model.weights",
            hint=f"a folder with {' or '.join(names)}; relative paths start at the working directory, {Path.cwd()}",
        )


def _check_dataset(config: Config, config_file: Path) -> None:
    d = config.dataset
    if d.demo:
        return
    is_pattern = any(c in str(d.annotations) for c in "{*?[")
    for key, path, exists in (
        ("annotations", d.annotations, is_pattern or d.annotations.is_file()),
        ("media_root", d.media_root, d.media_root.is_dir()),
        ("tokenizer", d.tokenizer, d.tokenizer.is_file()),
    ):
        if not exists:
            raise ConfigError(
                f"`{path}` does not exist",
                where=f"{config_file}: dataset.{key}",
                hint=f"relative paths start at the working directory, {Path.cwd()}",
            )
    if dataset_ref(config).sizes is not None:
        raise ConfigError(
            "a table of sizes has no samples to train on",
            where=f"{config_file}: dataset.annotations",
            hint="`dflop data profile` takes it; training needs texts and media",
        )


def _check_cluster(config: Config, config_file: Path) -> None:
    cluster = config.cluster
    if cluster.backend == "inline":
        raise ConfigError(
            "backend `inline` runs one process and cannot train",
            where=f"{config_file}: cluster.backend",
            hint="use `local` on this machine",
        )
    if cluster.backend != "slurm":
        return
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "backend `slurm` needs sbatch, which is not on PATH",
            where=f"{config_file}: cluster.backend",
            hint="run on a login node, or use backend `local`",
        )
    if cluster.hardware == "auto":
        raise ConfigError(
            "the hardware of the nodes must be named: this machine cannot know it",
            where=f"{config_file}: cluster.hardware",
            hint="any label that is the same whenever the nodes are the same, e.g. `A100-SXM4-80GB`",
        )
