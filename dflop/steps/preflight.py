"""Everything that can be wrong with a configuration, found in seconds: before Prefect, torch or a job starts.

`dflop run` stops at the first problem; `dflop config validate` lists all of them, with file, line and key. Problems of
this machine alone (no sbatch, no tracker) are marked as such, so that a laptop can validate a cluster's configuration.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dflop import units
from dflop.config import Config, Loaded, Origins
from dflop.data.chat import ChatTemplate
from dflop.data.formats.source import opener_of
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError, DflopError, did_you_mean
from dflop.jobs.curves import check_trackers
from dflop.models.family import Family, tower_of
from dflop.models.media import MediaHeader
from dflop.plan.candidates import check_processes
from dflop.records import LLM, ModuleSpec
from dflop.run.batches import stages_of
from dflop.run.directory import dataset_ref, family_of
from dflop.train.parameter_groups import MUON, check_targets

_SCAN_BYTES = 64 << 20


class Problem(NamedTuple):
    """Something that keeps a configuration from running."""

    error: DflopError
    is_of_machine: bool = False
    """Whether the configuration may be right, and only this machine is the wrong one."""


def preflight(config: Config, config_file: Path | Origins, *, is_dry: bool = False) -> None:
    """Check what a run will need; errors name the configuration's file and, with its `Origins`, the line.

    A dry run needs nothing of this machine.

    Raises:
        ConfigError: unknown family, module or media limit, a model that is not trained, missing dataset, a tokenizer
            without the tokens of the family, no Slurm or tracker here, hardware label missing.
        InfeasiblePlanError: modules may not share ranks and there are fewer processes than modules the data needs.
    """
    for problem in problems(config, config_file):
        if not (is_dry and problem.is_of_machine):
            raise problem.error


def problems(config: Config, config_file: Path | Origins) -> Iterator[Problem]:
    """Every problem of a configuration, one after the other."""
    origins = config_file if isinstance(config_file, Origins) else Origins(config_file)
    family: Family | None = None
    try:
        family = family_of(config)
    except ConfigError as error:
        key = error.where.split(".")
        where = origins.where(*key) if key[0] in Config.model_fields else error.where
        yield Problem(ConfigError(error.what, where=where, hint=error.hint))
    if family is not None:
        yield from _found(_check_trained, family, origins)
        each = config.cluster.num_processes_per_node
        yield from _found(check_context_parallel, config, family, each, origins.where("plan", "context_parallel"))
        yield from _found(_check_frozen, config.model.frozen, family, ("model", "frozen"), origins)
        yield from _found(_check_stages, config, family, origins)
        yield from _found(_check_groups, config, family, origins)
        yield from _found(_check_lora, config, family, origins)
        yield from _found(check_expert_parallel, config, family, origins.where("plan", "expert_parallel"))
        yield from _found(_check_muon, config, origins)
        yield from _found(_check_router_loss, config, family, origins)
    yield from _found(_check_validation, config, origins)
    yield from _found(_check_weights, config, origins)
    dataset = list(_found(_check_dataset, config, origins))
    yield from dataset
    if family is not None:
        yield from _found(_check_tokenizer, config, family, origins)
    yield from _cluster_problems(config, origins)
    where = origins.where("train", "report_to")
    yield from _found(check_trackers, config, where, is_of_machine=True)
    if family is not None and True not in config.plan.share_ranks and not dataset:
        yield from _found(check_processes, modules_named(family, config), config.cluster.spec().num_processes)


def remarks(config: Config, origins: Origins) -> Iterator[ConfigError]:
    """What keeps no configuration from being one, and is hardly wanted: weights that are random, too little memory.

    Memory is bounded from below by what training keeps of every parameter, wherever that lies; activations come on top.
    """
    if config.model.weights is None:
        hint = "model.weights: a folder with model.safetensors; or leave it to try things out"
        yield ConfigError("weights are random", where=origins.where("model"), hint=hint)
    try:
        specs, stages = family_of(config).specs(), stages_of(config)
    except ConfigError:  # a problem, and told as one
        return
    adapted = tuple(config.train.lora.targets) if config.train.lora is not None else ()
    of_trained = 16 + 4 * (config.train.ema_decay > 0)
    needed = max(_state_bytes(specs, (*stage.frozen, *adapted), of_trained) for stage in stages)
    cluster = config.cluster.spec()
    if needed > cluster.num_processes * cluster.memory_per_process_bytes:
        num_params = sum(spec.num_params for spec in specs)
        yield ConfigError(
            f"{units.count(num_params)} parameters on {cluster.num_processes} x "
            f"{units.num_bytes(cluster.memory_per_process_bytes)}: no plan fits, as weights, gradients and optimizer "
            f"take {units.num_bytes(needed)} at least",
            where=origins.where("cluster"),
            hint="more processes or memory, fewer modules that train (model.frozen); elsewhere: dflop plan CONFIG "
            "--device h100 --gpus 64",
        )


def _state_bytes(specs: Sequence[ModuleSpec], frozen: Sequence[str], of_trained: int) -> int:
    """Bytes that training keeps at least of all parameters together: a master weight, a gradient, two moments, ..."""
    found = 0
    for spec in specs:
        every, edge = spec.num_params, spec.num_edge_params
        trained = 0 if spec.module in frozen else edge if tower_of(spec.module) in frozen else every
        found += of_trained * trained + 2 * (every - trained)
    return found


def with_every_limit(loaded: Loaded) -> Loaded:
    """The configuration with the family's media limits where nobody states one, if a family can be made."""
    config = loaded.config
    with contextlib.suppress(ConfigError):  # told by `config validate`
        model = config.model.model_copy(update={"media": dict(family_of(config).media)})
        return replace(loaded, config=config.model_copy(update={"model": model}))
    return loaded


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
    placed = {family.place(MediaHeader(k, 224, 224, 8, 1.0)).module for k in kinds}
    return tuple(m for m in family.modules if m == LLM or m in placed)


def _found(check: Callable[..., None], *args: object, is_of_machine: bool = False) -> Iterator[Problem]:
    try:
        check(*args)
    except DflopError as error:
        yield Problem(error, is_of_machine)


@contextlib.contextmanager
def _at(where: str, what: str = "") -> Iterator[None]:
    """Errors of the block, as errors of a place in the configuration."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}{error.what}", where=where, hint=error.hint) from None


def _check_trained(family: Family, origins: Origins) -> None:
    if family.untrained:
        raise ConfigError(
            f"models of type `{family.name}` are planned for and not trained: {family.untrained}",
            where=origins.where("model", "hf_config"), hint="`dflop plan` takes it; see docs/models.md",
        )  # fmt: skip


def check_context_parallel(config: Config, family: Family, each: int, where: str = "plan.context_parallel") -> None:
    """Refuse degrees of context parallelism that no plan can have: of the model, and on nodes with `each` processes.

    Raises:
        ConfigError: the configuration asks for one above 1 of a model whose samples ranks cannot share, or for degrees
            none of which divides a node.
    """
    if family.whole_samples and (asked := [cp for cp in config.plan.context_parallel if cp > 1]):
        what = f"context parallelism of {', '.join(map(str, asked))} for `{family.name}`: {family.whole_samples}"
        raise ConfigError(what, where=where, hint="remove the key: plans then have cp 1")
    if (wanted := config.plan.context_parallel) and all(each % cp for cp in wanted):
        what = f"context parallelism of {', '.join(map(str, wanted))}: ranks that share samples are of one node"
        raise ConfigError(f"{what}, which has {each}", where=where, hint=f"degrees that divide {each}")


def check_expert_parallel(config: Config, family: Family, where: str = "plan.expert_parallel") -> None:
    """Refuse degrees of expert parallelism that no plan of a model can have.

    Raises:
        ConfigError: the configuration asks for one.
    """
    choices = next(spec.ep_choices for spec in family.specs() if spec.module == LLM)
    if asked := [ep for ep in config.plan.expert_parallel if ep not in choices]:
        what = f"expert parallelism of {', '.join(map(str, asked))} for `{family.name}`"
        valid = f"valid: {', '.join(map(str, choices))}"
        why = "ranks share out all experts of a layer evenly" if len(choices) > 1 else "its layers have no experts"
        raise ConfigError(f"{what}: {why}", where=where, hint=valid)


def _check_frozen(frozen: Sequence[str], family: Family, key: tuple[str, ...], origins: Origins) -> None:
    where = origins.where(*key)
    for name in frozen:
        if name not in family.freezable:
            raise ConfigError(f"unknown module `{name}`", where=where, hint=did_you_mean(name, family.freezable))
    if set(frozen) >= set(family.modules):
        raise ConfigError("every module is frozen: there is nothing to train", where=where)


def _check_stages(config: Config, family: Family, origins: Origins) -> None:
    names = [stage.name for stage in config.stages]
    for index, stage in enumerate(config.stages):
        key, is_last = ("stages", str(index)), index == len(names) - 1
        if stage.name in names[:index]:
            raise ConfigError(f"two stages are named `{stage.name}`", where=origins.where(*key, "name"))
        where = origins.where(*key, "num_steps")
        if is_last and stage.num_steps is not None:
            hint = "remove it; `train.num_steps` is the total"
            raise ConfigError("the last stage takes the remaining steps", where=where, hint=hint)
        if not is_last and stage.num_steps is None:
            what = f"stage `{stage.name}` has no number of steps"
            raise ConfigError(what, where=where, hint="only the last stage takes the remaining steps")
        _check_frozen(stage.frozen, family, (*key, "frozen"), origins)
    stages = stages_of(config)
    last, warmup = stages[-1], config.train.warmup_steps
    if config.stages and last.num_steps < 1:
        what = f"no step remains of {config.train.num_steps} for the last stage"
        hint = f"more than {last.first_step}, which the earlier stages use"
        raise ConfigError(what, where=origins.where("train", "num_steps"), hint=hint)
    if "warmup_steps" in config.train.model_fields_set and (short := [s for s in stages if s.num_steps < warmup]):
        what = f"{warmup} steps of warm-up, and `{short[0].name}` has {short[0].num_steps}"
        hint = "fewer: every stage warms up anew, to its own learning rate"
        raise ConfigError(what, where=origins.where("train", "warmup_steps"), hint=hint)


def _check_groups(config: Config, family: Family, origins: Origins) -> None:
    try:
        check_targets(config.train.groups, family.modules)
    except ConfigError as error:
        raise ConfigError(error.what, where=origins.where(*error.where.split(".")), hint=error.hint) from None


def _check_muon(config: Config, origins: Origins) -> None:
    """Muon is given matrices that plans keep whole."""
    if config.train.optimizer != MUON:
        return
    hint = "or train.optimizer: adamw, as Muon updates whole matrices"
    if False not in config.plan.shard_parameters:
        what = "plan.shard_parameters is [true], which cuts matrices"
        raise ConfigError(what, where=origins.where("plan", "shard_parameters"), hint=f"[false], {hint}")
    if 1 not in config.model_profile.tp:
        what = f"model_profile.tp is {list(config.model_profile.tp)}, which cuts matrices"
        raise ConfigError(what, where=origins.where("model_profile", "tp"), hint=f"add 1, {hint}")


def _check_lora(config: Config, family: Family, origins: Origins) -> None:
    """What can be said without the model; `add_adapters` says which Linears it has."""
    if config.train.lora is None:
        return
    stages = stages_of(config)
    if max(config.plan.expert_parallel, default=1) > 1:
        what = f"plan.expert_parallel is {list(config.plan.expert_parallel)}, and adapters need experts whole"
        raise ConfigError(what, where=origins.where("plan", "expert_parallel"), hint="[1], or no train.lora")
    if config.train.compile and config.train.lora.dropout:
        what = f"train.lora.dropout is {config.train.lora.dropout:g}, and compiled layers draw no masks"
        hint = "0, or train.compile: false"
        raise ConfigError(what, where=origins.where("train", "lora", "dropout"), hint=hint)
    for module in config.train.lora.targets:
        where = origins.where("train", "lora", "targets", module)
        if module not in family.modules:
            raise ConfigError(f"unknown module `{module}`", where=where, hint=did_you_mean(module, family.modules))
        if all(module in stage.frozen for stage in stages):
            raise ConfigError(
                f"`{module}` is frozen, and so would its adapters be", where=where,
                hint="remove it here or from model.frozen: where a module has adapters nothing else of it trains",
            )  # fmt: skip
        if any(tower_of(module) in stage.frozen for stage in stages):
            raise ConfigError(
                f"`{tower_of(module)}` is frozen, which lets the projector train, and `{module}` has adapters",
                where=where, hint="one of them: where a module has adapters nothing else of it trains",
            )  # fmt: skip


def _check_router_loss(config: Config, family: Family, origins: Origins) -> None:
    """What a coefficient of one's own cannot do; one in the model's config is judged with its class."""
    if not (wanted := config.train.router_loss):
        return
    where, adapted = origins.where("train", "router_loss"), config.train.lora.targets if config.train.lora else ()
    if LLM in adapted or all(LLM in stage.frozen for stage in stages_of(config)):
        what = f"train.router_loss is {wanted:g}, and `{LLM}` {'has adapters' if LLM in adapted else 'is frozen'}"
        raise ConfigError(f"{what}: no router trains", where=where, hint="0")
    from dflop.train.router_loss import check_router_loss  # with torch, which checks do not need otherwise

    with _at(where):
        check_router_loss(family, wanted)


def _check_validation(config: Config, origins: Origins) -> None:
    every, num_steps = config.validation.every_steps, config.train.num_steps
    if config.validation.is_wanted and "every_steps" in config.validation.model_fields_set and every > num_steps:
        raise ConfigError(
            f"a validation every {every} steps of a run of {num_steps}",
            where=origins.where("validation", "every_steps"), hint=f"at most {num_steps}",
        )  # fmt: skip


def _check_weights(config: Config, origins: Origins) -> None:
    folder = config.model.weights
    names = ("model.safetensors", "model.safetensors.index.json")
    if folder is not None and not any((folder / name).is_file() for name in names):
        hint = f"a folder with {' or '.join(names)}; {_relative()}"
        raise ConfigError(f"no weights in `{folder}`", where=origins.where("model", "weights"), hint=hint)


def _relative() -> str:
    return f"relative paths start at the working directory, {Path.cwd()}"


def _check_dataset(config: Config, origins: Origins) -> None:
    d = config.dataset
    if d.demo:
        return
    is_pattern = any(c in str(d.annotations) for c in "{*?[")
    for key, path, exists in (
        ("annotations", d.annotations, is_pattern or d.annotations.exists()),
        ("media_root", d.media_root, d.media_root.is_dir()),
        ("tokenizer", d.tokenizer, d.tokenizer.is_file()),
    ):
        if not exists:
            raise ConfigError(f"`{path}` does not exist", where=origins.where("dataset", key), hint=_relative())
    where, is_mixture = origins.where("dataset", "annotations"), d.annotations.suffix in (".yaml", ".yml")
    with contextlib.nullcontext() if is_mixture else _at(where):  # errors of a mixture name it
        dataset = dataset_ref(config)
        for entry in dataset.entries:
            opener_of(entry.paths[0])
    if dataset.sizes is not None:
        hint = "`dflop data profile` takes it; training needs texts and media"
        raise ConfigError("a table of sizes has no samples to train on", where=where, hint=hint)


def _check_tokenizer(config: Config, family: Family, origins: Origins) -> None:
    d = config.dataset
    if d.demo or not d.tokenizer.is_file():
        return
    with _at(origins.where("dataset", "chat_template")):
        ChatTemplate.load(d.chat_template)
    with _at(origins.where("dataset", "tokenizer"), f"`{d.tokenizer}`: "):
        ChatTokenizer(d.tokenizer, family, d.chat_template, d.special_tokens)


def _cluster_problems(config: Config, origins: Origins) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.backend == "slurm" and shutil.which("sbatch") is None:
        what, hint = "backend `slurm` needs sbatch, which is not on PATH", "run on a login node, or use backend `local`"
        yield Problem(ConfigError(what, where=origins.where("cluster", "backend"), hint=hint), is_of_machine=True)
    if cluster.backend == "slurm" and cluster.hardware == "auto":
        what = "cluster.hardware must be set: this machine cannot detect the nodes' hardware"
        hint = "any label that is the same whenever the nodes are the same, e.g. `A100-SXM4-80GB`"
        yield Problem(ConfigError(what, where=origins.where("cluster", "hardware"), hint=hint))
