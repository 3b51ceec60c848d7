"""A commented configuration out of what was found, with what has to be edited marked in it and listed.

Nothing is guessed silently: a value that was found says where, one that was assumed says so, and one that is missing is
a path that does not exist, which `dflop config validate` and `dflop run` refuse by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflop import units
from dflop.config import Config, dump_yaml, load_model
from dflop.data.annotations import printable
from dflop.data.formats.source import open_source
from dflop.data.model_tokenizer import FoundTokenizer, find_tokenizer, tokens_in_texts
from dflop.errors import ConfigError
from dflop.models import GENERIC, cache_of_models, load_family
from dflop.models.hub import HubModel, read_hub_model
from dflop.models.processor_settings import Settings
from dflop.starter.clusters import FoundCluster, find_cluster
from dflop.starter.dataset import WITHOUT_RATE, FoundDataset, find_dataset
from dflop.starter.hub_files import model_config as config_of
from dflop.steps.planning import SAMPLES_PER_GPU

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MAX_TOKENS = 8192
_CACHE = cache_of_models(Config.model_fields["store"].default)
MISSING = "MISSING"
"""Stands for a path that was not found."""


@dataclass(frozen=True, slots=True)
class Starter:
    """A configuration to begin with."""

    name: str
    """Name of the runs."""
    text: str
    found: tuple[str, ...]
    """What was found, a line each."""
    to_edit: tuple[str, ...]
    """What has to be looked at before a run, a line each."""
    tokenizer_problem: str
    """Why no sample can be counted with the tokenizer that was found; empty: it can."""


def make_starter(
    model_config: Path, data: Path, gpus: int | None = None, split: str = "", cluster: str = ""
) -> Starter:
    """A configuration for a model and a dataset, on this machine or on Slurm.

    Args:
        model_config: `config.json` of a Hugging Face model, or the folder it is in; or a `model` section, a YAML file.
        data: A file of rows, a pattern of several, or a folder.
        gpus: That the global batch is for; None: those of the cluster.
        split: Of the data, or several with commas; empty: the one for training.
        cluster: As of `find_cluster`.

    Raises:
        ConfigError: the model is not known, there is no training data or it is open what is meant, there are no GPUs,
            or a path is no UTF-8.
    """
    if gpus is not None and gpus < 1:
        raise ConfigError(f"cannot train on {gpus} GPUs", where="--gpus", hint="1 or more")
    model_config = config_of(model_config)
    model = _section(model_config) if _is_section(model_config) else read_hub_model(model_config, _CACHE)
    dataset = find_dataset(data, split)
    entry = dataset.card.taken[0].entry
    folders = tuple(dict.fromkeys((model_config.parent, entry.paths[0].parent, dataset.media_root)))
    tokenizer = find_tokenizer(folders, model.family)
    named = tokens_in_texts(tokenizer, model.family, open_source(entry.paths[0], mapping=entry.mapping))
    writer = _Writer(model_config, model, dataset, tokenizer, named, gpus, find_cluster(cluster))
    text = writer.text()
    if (shown := printable(text)) != text:
        line = next(line for line in shown.splitlines() if "\\udc" in line)
        raise ConfigError(f"a name is not UTF-8, as a configuration must be: {line.strip()}", hint="rename it")
    return Starter(writer.name, text, tuple(writer.found()), tuple(writer.to_edit()), tokenizer.problem)


def _is_section(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _section(path: Path) -> HubModel:
    """The model that a YAML file describes, as a `model` section would."""
    section = load_model(path)
    family = load_family(section.family, section.hf_config, section.media, section.processor, _CACHE)
    settings = Settings(section.media, dict.fromkeys(section.media, path.name))
    return HubModel(family, section.hf_config, settings, section.dtype, section.processor)


class _Writer:
    def __init__(
        self,
        model_config: Path,
        model: HubModel,
        dataset: FoundDataset,
        tokenizer: FoundTokenizer,
        named: Mapping[str, int],
        wanted: int | None,
        cluster: FoundCluster,
    ) -> None:
        """`wanted` GPUs are to train, where these are not this machine's; `named`: special tokens -> rows."""
        self.model_config, self.model, self.dataset = model_config, model, dataset
        self.tokenizer, self.named, self.wanted, self.cluster = tokenizer, named, wanted, cluster
        stem = Path(dataset.card.annotations).absolute().name.partition(".")[0]
        self.name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{model.family.name}-{stem}").strip("-") or "run"
        has_weights = any((model_config.parent / name).is_file() for name in _WEIGHTS)
        self.weights = model_config.parent if has_weights else None
        most = int(model.family.configs["llm"].get("max_position_embeddings") or _MAX_TOKENS)
        self.max_tokens = min(_MAX_TOKENS, most)
        self.model_limit = f"; the model takes {most:,}" * (most > self.max_tokens)
        self.batch_size, self.batch_note = self._batch()
        self.not_taken = {k: n for k, n in dataset.kinds.items() if k not in model.family.media_tokens}
        limits, self.sources = model.family.media, model.settings.sources
        self.stated = {key: value for key, value in limits.items() if key in self.sources}
        self.defaults = {key: value for key, value in limits.items() if key not in self.sources}

    def _batch(self) -> tuple[int, str]:
        """Samples of a global batch, as many for every process, and what that is made for."""
        num_places, num_rows = self.wanted or self.cluster.num_processes, max(1, int(self.dataset.num_good))
        places = f"{num_places} {'GPUs' if self.wanted or self.cluster.has_gpus else 'processes'}"
        each = min(SAMPLES_PER_GPU, num_rows // num_places)
        if not each:
            return num_rows, f"all rows: fewer than {places}, so most of them work in a pipeline or idle"
        few = f", as there are {num_rows} rows" * (each < SAMPLES_PER_GPU)
        return each * num_places, f"{each} for each of {places}{few}"

    def found(self) -> Iterator[str]:
        specs, data = self.model.family.specs(), self.dataset
        sizes = ", ".join(f"{s.module} {s.num_layers} layers" for s in specs)
        num, num_active = self.model.num_params, self.model.num_active_params
        active = f", {units.count(num_active)} active" * (num_active < num)
        yield f"model: {self.model.family.name}, {units.count(num)} parameters{active} ({sizes})"
        if not _is_section(self.model_config):
            yield f"weights: {self.weights or 'none next to the config; they will be random'}"
        kinds = ", ".join(f"{n} with {kind}" for kind, n in data.kinds.items()) or "text only"
        looked = f"of {data.num_looked_at} rows sampled: {kinds}"
        first, *more = data.card.lines()
        yield f"data: {first}; {looked}"
        yield from more
        if data.frames:
            listed = ", ".join(f"{count} {how}" for how, count in data.frames.items())
            yield f"videos given as frames, in the rows sampled: {listed}"
        if data.num_media:
            where = "found" if len(data.card.taken) > 1 else f"under {data.media_root}"
            yield f"media: {data.num_media_found} of {data.num_media} named files are {where}"
        if data.unknown_keys:
            yield f"unknown keys, ignored: {_counted(data.unknown_keys)}"
        if self.tokenizer.path is not None:
            template = self.tokenizer.template if self.tokenizer.has_template else "not found in any file"
            yield f"tokenizer: {self.tokenizer.path}, chat template {template}"
        yield from self.tokenizer.notes
        if self.named:
            tokens = ", ".join(f"{token} in {count}" for token, count in self.named.items())
            yield f"special tokens in texts of the rows sampled, added to dataset.special_tokens: {tokens}"
        for key, value in self.stated.items():
            yield f"model.media.{key}: {value}, {self.sources[key]}"

    def to_edit(self) -> Iterator[str]:
        data = self.dataset
        if self.tokenizer.problem:
            path = f"{self.tokenizer.path}: " if self.tokenizer.path else ""
            yield f"dataset.tokenizer: {path}{self.tokenizer.problem}"
        if self.tokenizer.path is not None and not self.tokenizer.has_template:
            yield f"dataset.chat_template: no file states one; `{self.tokenizer.template}` is assumed"
        if defaults := ", ".join(f"{key} {value}" for key, value in self.defaults.items()):
            yield f"model.media: not in the model's own settings, the family's defaults are used: {defaults}"
        if self.model.family.untrained:
            yield f"model: planned for, not trained: {self.model.family.untrained}"
        for entry in self.model.settings.not_followed:
            yield f"model: {entry}"
        if data.num_media > data.num_media_found:
            missing = data.num_media - data.num_media_found
            yield f"dataset.media_root: {missing} of {data.num_media} named files are not under {data.media_root}"
        for kind, count in self.not_taken.items():
            yield (
                f"data_profile.max_bad_frac: {count} of {data.num_looked_at} sampled rows have {kind}, which "
                f"{self.model.family.name} does not support; they are skipped, and more than 1 % stops the run"
            )
        if data.num_bad:
            yield (
                f"data_profile.max_bad_frac: {data.num_bad} of {data.num_looked_at} sampled rows failed to parse "
                f"({data.first_reason})"
            )
        if WITHOUT_RATE in data.frames:
            yield (
                f"{data.card.annotations}: {data.frames[WITHOUT_RATE]} videos of the sampled rows are frames "
                f"{WITHOUT_RATE}; set `sample_fps` (frames per second) in the row or part, or they are skipped"
            )
        if data.refused_keys:
            yield (
                f"dataset.ignored_keys: sampled rows are skipped for {_counted(data.refused_keys)}; add keys that may "
                "be ignored"
            )
        more = " of this machine; for others: dflop init --gpus" if self.cluster.is_here and not self.wanted else ""
        yield f"plan.global_batch_size: {self.batch_size}, {self.batch_note}{more}"
        yield f"dataset.max_llm_tokens: {self.max_tokens}; longer rows are skipped{self.model_limit}"
        yield "train.num_steps, train.learning_rate: assumed"
        yield f"cluster: {self.cluster.note}"

    def text(self) -> str:
        parts = (self._head(), self._model(), ("", *self.cluster.lines), self._dataset(), self._rest())
        return "".join(f"{line}\n" for part in parts for line in part)

    def _head(self) -> Iterator[str]:
        yield f"# Made by `dflop init` from {self.model_config} and {self.dataset.card.annotations}."
        yield "# Lines with EDIT were not found or had to be assumed. Every key, with defaults and where each"
        yield "# value comes from: `dflop config show FILE`; to check it: `dflop config validate FILE`."
        yield f"name: {self.name}"
        yield "store: .dflop/store   # history of all runs; query it with `dflop sql`"
        yield "runs: runs            # a folder per run: logs, checkpoints, report"

    def _model(self) -> Iterator[str]:
        sizes = ", ".join(s.module for s in self.model.family.specs())
        yield f"\n# {units.count(self.model.num_params)} parameters in {sizes}."
        if _is_section(self.model_config):
            yield f"model: {_scalar(self.model_config.resolve())}"
            return
        yield "model:"
        yield f"  family: {GENERIC if self.model.processor else self.model.family.name}"
        yield f"  dtype: {self.model.dtype}"
        if self.weights is not None:
            yield f"  weights: {_scalar(self.weights)}   # training starts from these"
        else:
            yield "  # weights: FOLDER   # EDIT: a folder with model.safetensors; without one weights are random"
        yield "  # frozen: [vision.tower]   # modules that do not train; `stages:` trains in parts"
        if self.model.processor is not None:
            yield f"  processor: {_scalar(self.model.processor)}   # counts tokens"
        whole = "the model's config.json" if self.model.processor else "where it differs from transformers' defaults"
        yield f"  hf_config:   # {whole}"
        yield from (f"    {line}" for line in dump_yaml(dict(self.model.hf_config)).splitlines())
        if self.stated:
            yield "  media:"
        for key, value in self.stated.items():
            yield f"    {key}: {json.dumps(value)}   # {_comment(self.sources[key])}"
        if defaults := ", ".join(f"{key}: {value}" for key, value in self.defaults.items()):
            yield f"  # EDIT: limits that no file states, with this family's defaults: {defaults}"

    def _dataset(self) -> Iterator[str]:
        data = self.dataset
        yield f"\n# {printable(next(data.card.lines()))}. Relative paths start at the working directory."
        yield "dataset:"
        yield f"  annotations: {_scalar(data.card.annotations)}"
        if data.card.written_split:
            yield f"  split: {_scalar(data.card.written_split)}"
        note = "" if data.num_media == data.num_media_found else "   # EDIT: not all named files are here"
        yield f"  media_root: {_scalar(data.media_root)}{note}"
        path = self.tokenizer.path or f"{MISSING}/tokenizer.json"
        note = f"   # EDIT: {_comment(self.tokenizer.problem)}" if self.tokenizer.problem else ""
        yield f"  tokenizer: {_scalar(path)}{note}"
        note = "" if self.tokenizer.has_template else "   # EDIT: assumed, no file states one"
        yield f"  chat_template: {_scalar(self.tokenizer.template)}{note}"
        if self.named:
            yield (
                f"  special_tokens: {json.dumps(sorted(self.named))}   # allowed in texts; others are tokenized as "
                "plain text"
            )
        note = f"EDIT: longer rows are skipped, or: overlong: [shrink, truncate]{self.model_limit}"
        yield f"  max_llm_tokens: {self.max_tokens}   # {note}"

    def _rest(self) -> Iterator[str]:
        data = self.dataset
        if data.num_bad or self.not_taken:
            yield "\ndata_profile:"
            yield "  max_bad_frac: 0.01   # EDIT: a larger share of skipped rows stops the run"
        steps = max(1, data.card.num_rows // self.batch_size)
        yield "\nplan:"
        yield f"  global_batch_size: {self.batch_size}   # EDIT: samples per optimizer step, {self.batch_note}"
        yield "\ntrain:"
        yield f"  num_steps: {steps}   # EDIT: {'once over the data' if data.card.num_rows else 'assumed'}"
        yield "  learning_rate: 1.0e-5   # EDIT"
        yield f"  checkpoint_every: {max(1, min(100, steps // 4))}"


def _scalar(value: object) -> str:
    """A string as YAML reads it back."""
    return dump_yaml({"x": str(value)}).strip().removeprefix("x: ")


def _counted(keys: Mapping[str, int]) -> str:
    most = sorted(keys.items(), key=lambda item: (-item[1], item[0]))[:10]
    return ", ".join(f"{key} ({count} row{'s' * (count > 1)})" for key, count in most)


def _comment(text: str) -> str:
    return " ".join(text.split())
