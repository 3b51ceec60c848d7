"""Hugging Face folders: a model whose parameters take no memory yet, the tensors to fill them with, a folder written.

Folders name tensors as they were named when the family was published; how those names map to the model's own is
transformers' knowledge, and asked of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dflop.errors import ConfigError, TrainError
from dflop.models import attention
from dflop.models.family import Family
from dflop.models.generic import classes
from dflop.models.stored_names import Stored, StoredNames
from dflop.progress import At, counted, unseen


def hf_types(family: Family, hf_config: Mapping[str, Any]) -> tuple[Any, Any]:
    """(config, class of the model) of transformers.

    Args:
        family: Says the `model_type` where the config does not.
        hf_config: Keyword arguments of the config class, token ids included.
    """
    config = classes.config_of({"model_type": family.name, **hf_config})
    return config, classes.class_of(config)


def construct(family: Family, hf_config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The family's model in training mode, with layers that keep little; stages give it packed attention.

    Args:
        family: As for `hf_types`.
        hf_config: As for `hf_types`.
        dtype: Parameter type.
    """
    attention.register()
    return classes.construct(hf_types(family, hf_config)[0], dtype).train()


_NUM_NAMED = 3
_NEVER_NEEDED = r"rotary_emb\.inv_freq|^(talker|token2wav)\."
"""Tables that old releases wrote although they follow from the configuration, and what Qwen2.5-Omni speaks with."""


def build_empty(family: Family, hf_config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The family's model with parameters on the meta device, which take no memory; buffers are real.

    Args:
        family: Names the transformers classes.
        hf_config: Keyword arguments of the config class, token ids included.
        dtype: Parameter type.
    """
    with _parameters_on_meta():
        return construct(family, hf_config, dtype)


def materialise(
    module: nn.Module, device: torch.device, *, recurse: bool = True
) -> dict[nn.Parameter, nn.Parameter]:  # fmt: skip
    """Give a module's parameters memory, their values arbitrary; returns the new ones by those they replace."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules() if recurse else (module,):
        for name, p in part._parameters.items():
            if p is None or not p.is_meta:
                continue
            if p not in made:
                made[p] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                made[p]._backward_hooks = p._backward_hooks  # tensor parallelism sums some gradients in hooks
            part._parameters[name] = made[p]
    return made


def plain_model(family: Family, hf_config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """The family's model as transformers has it, attention and all, with these weights; for evaluation.

    Args:
        family: Names the transformers classes.
        hf_config: Keyword arguments of the config class, token ids included.
        weights: Every parameter by global name, in the type it is to have.

    Raises:
        TrainError: the weights are not this model's.
    """
    config, model_class = hf_types(family, hf_config)
    with _parameters_on_meta():
        model: Any = model_class._from_config(
            config, attn_implementation="sdpa", dtype=next(iter(weights.values())).dtype
        )
    _check_names(model, weights)
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    made: nn.Module = model.eval()
    return made


def load_folder(family: Family, folder: Path) -> nn.Module:
    """The family's model as transformers loads it, for evaluation.

    Raises:
        ConfigError: it does not load.
    """
    _, model_class = hf_types(family, family.hf_config)
    try:
        made: nn.Module = model_class.from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        what = f"cannot load the model: {' '.join(str(error).split())[:300]}"
        raise ConfigError(what, where=str(folder)) from error
    return made


class Weights(Protocol):
    """Where first weights come from."""

    def read(self, name: str, axis: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """A parameter by its global name, or `[first, end)` ranges of it along an axis, one behind the other."""


class WeightFolder:
    """Tensors of a folder by global name; nothing but headers is read before a tensor is asked for.

    Args:
        path: Folder with `model.safetensors`, or several files and `model.safetensors.index.json`.
        model: Whole model, which may be empty.

    Raises:
        ConfigError: no such folder, or its tensors are not the model's.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._path = path
        self._expected = expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._stored = StoredNames(model, {*expected, *model.state_dict()})
        self._made_of: dict[str, list[tuple[Stored, tuple[Path, str]]]] = {}
        """What a parameter that is computed when read is made from."""
        self._made: dict[str, torch.Tensor] = {}
        """What was computed last."""
        self._place = self._places(model)
        wrong = [n for n, shape in expected.items() if n in self._place and self._shape(n) != shape]
        there = self._place.keys() | self._made_of.keys()
        told = [some_of(expected.keys() - there, "missing from it"), some_of(wrong, "of another shape")]
        if any(told):
            raise self._refusal(f"parameters of the model {'; '.join(filter(None, told))}")

    def read(self, name: str, axis: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """A tensor, or parts of it.

        Args:
            name: Global name.
            axis: Along which to cut.
            ranges: `[first, end)` of the parts, which are put one behind the other; None: everything.

        Raises:
            ConfigError: the file cannot be read.
        """
        if name in self._made_of:
            whole = self._converted(name)
            return whole if ranges is None else torch.cat([whole.narrow(axis, n, end - n) for n, end in ranges], axis)
        return self._read(*self._place[name], axis, ranges)

    def _converted(self, name: str) -> torch.Tensor:
        """A parameter that is computed from several tensors, and kept until others are."""
        if name not in self._made:
            self._made = {}  # two layers' experts at once would be twice the memory
            parts = sorted(self._made_of[name], key=lambda part: _in_order(part[1][1]))
            tensors = (self._read(*place) for _, place in parts)
            self._made = self._stored.convert([(stored, key) for stored, (_, key) in parts], tensors)
        if tuple(self._made[name].shape) != self._expected[name]:
            raise self._refusal(f"parameters of the model {some_of([name], 'of another shape')}")
        return self._made[name]

    def _read(
        self, file: Path, key: str, axis: int = 0, ranges: Sequence[tuple[int, int]] | None = None
    ) -> torch.Tensor:
        try:
            with safe_open(file, framework="pt") as opened:
                if ranges is None:
                    whole: torch.Tensor = opened.get_tensor(key)
                    return whole
                lazy, before = opened.get_slice(key), (slice(None),) * axis
                return torch.cat([lazy[(*before, slice(first, end))] for first, end in ranges], dim=axis)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read weights: {error}", where=str(file)) from error

    def _places(self, model: Any) -> dict[str, tuple[Path, str]]:
        """Global name -> (file, name in it)."""
        files = self._files()
        names = {*self._expected, *model.state_dict()}
        places, unknown = {}, []
        # What is tied has one name among the parameters, and any of its names in files.
        tied = {n: source for n, source in getattr(model, "all_tied_weights_keys", {}).items()}
        ignored = [_NEVER_NEEDED, *(model._keys_to_ignore_on_load_unexpected or ())]
        for file, keys in files.items():
            for key in keys:
                stored = self._stored.stored(key)
                name = stored.name
                if name in names and stored.pattern is not None:
                    parts = self._made_of.setdefault(name, [])
                    parts.append((stored, (file, key)))
                    self._made_of.update(dict.fromkeys(self._stored.made_of(stored), parts))
                elif name in names:
                    places[name] = (file, key)
                elif not any(re.search(pattern, text) for pattern in ignored for text in (key, name)):
                    unknown.append(key)
        if unknown:
            raise self._refusal(f"tensors in it {some_of(unknown, 'unknown to the model')}")
        for name, source in tied.items():
            if source not in places and name in places:
                places[source] = places[name]
        return places

    def _files(self) -> dict[Path, list[str]]:
        """Names of tensors by file."""
        index = self._path / "model.safetensors.index.json"
        try:
            if index.is_file():
                by_name: dict[str, str] = json.loads(index.read_text())["weight_map"]
                names = sorted(set(by_name.values()))
                if outside := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
                    raise ValueError(
                        f"the index names files outside its folder, or other than safetensors: {', '.join(outside[:3])}"
                    )
                files = [self._path / name for name in names]
            else:
                files = [self._path / "model.safetensors"]
            found = {}
            for file in files:
                if not file.is_file():  # a pipe would be waited for
                    raise FileNotFoundError(f"{file.name} is not a file")
                with safe_open(file, framework="pt") as opened:
                    found[file] = list(opened.keys())
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(
                f"cannot read weights: {error}",
                where=str(self._path),
                hint="model.weights is a folder with config.json and model.safetensors, or their index",
            ) from error
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        file, key = self._place[name]
        with safe_open(file, framework="pt") as opened:
            return tuple(opened.get_slice(key).get_shape())

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"the weights are of another model: {what}",
            where=str(self._path),
            hint="compare model.hf_config with the folder's config.json",
        )


def write_folder(
    family: Family, hf_config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], folder: Path,
    *, max_shard_bytes: int, at: At = unseen,
) -> None:  # fmt: skip
    """Write a folder that `from_pretrained` loads: tied weights once, names those of the family's published folders.

    Args:
        family: Names the transformers classes.
        hf_config: Keyword arguments of the config class, token ids included.
        weights: Every parameter by global name, in the type it is to have in the folder.
        folder: Made if need be.
        max_shard_bytes: A larger model becomes several files and an index.
        at: Receives how many files of weights are written.

    Raises:
        TrainError: the weights are not this model's.
    """
    model: Any = build_empty(family, hf_config, next(iter(weights.values())).dtype)
    _check_names(model, weights)
    with _files_counted(at):
        model.save_pretrained(folder, state_dict=dict(weights), max_shard_size=max_shard_bytes)
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read what it writes
    # Made up from defaults: nobody has said how the model is to generate.
    (folder / "generation_config.json").unlink(missing_ok=True)


@contextmanager
def _files_counted(at: At) -> Iterator[None]:
    """Within it, transformers reports the files that it goes through to `at`, instead of drawing a bar on stderr."""
    from transformers.utils.logging import set_tqdm_hook

    before = set_tqdm_hook(lambda _make, args, _options: counted(list(args[0]), "writing files of weights", at))
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _check_names(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    expected = dict(model.named_parameters())
    if different := some_of(expected.keys() ^ weights.keys(), "parameters are not both in model and checkpoint"):
        raise TrainError(different)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, parameters are created without memory; buffers, which no file holds, are computed as ever."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]  # torch has no hook
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # put back


def _in_order(key: str) -> list[tuple[int, str]]:
    """By which experts come in the order of their numbers."""
    return [(int(part) if part.isdigit() else -1, part) for part in key.split(".")]


def some_of(names: Collection[str], what: str) -> str:
    """How many names there are and the first of them; empty where there is none."""
    if not names:
        return ""
    return f"{len(names)} {what}, e.g. {', '.join(f'`{name}`' for name in sorted(names)[:_NUM_NAMED])}"
