"""Which Linears of a model have low-rank adapters, what these begin with, and the model that they make of the base.

The base (every parameter of a module with adapters but those) does not train: it keeps the values that it is read with,
has neither gradients nor optimizer states, and no checkpoint holds it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from dflop.errors import ConfigError, did_you_mean
from dflop.models.build import located
from dflop.models.family import Family
from dflop.models.generic.experts import experts_of
from dflop.models.generic.states import has_state
from dflop.models.low_rank import adapt
from dflop.models.splits import LORA_A, LORA_B
from dflop.models.weights import Weights
from dflop.records import LLM

if TYPE_CHECKING:
    from dflop.config import LoraConfig  # the engine is measured on machines without pydantic

ALL_LINEAR = "all-linear"
_WHERE = "train.lora.targets"
_NUM_NAMED = 8


@dataclass(frozen=True, slots=True)
class Adapters:
    """What was added to a model."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the adapters' parameters, by global name."""
    base: frozenset[str]
    """Parameters that never train, by global name: the others of the modules that have adapters."""
    scale: float

    @property
    def linears(self) -> tuple[str, ...]:
        """Global names of the Linears with adapters."""
        return tuple(name.removesuffix(f".{LORA_A}.weight") for name in self.shapes if name.endswith(_A))


_A, _B = f".{LORA_A}.weight", f".{LORA_B}.weight"
NO_ADAPTERS = Adapters({}, frozenset(), 0.0)


def add_adapters(model: nn.Module, family: Family, lora: LoraConfig | None) -> Adapters:
    """Add adapters to a whole model and let nothing else of the modules that have them train.

    Args:
        model: Whole, before it is cut; it may be empty. Changed in place.
        family: Of the model.
        lora: Which; None: none.

    Raises:
        ConfigError: a target is no Linear that can have one, or leaves layers of the LLM without; or one is smaller
            than the rank.
    """
    if lora is None:
        return NO_ADAPTERS
    chosen: dict[str, nn.Linear] = {}
    for module, targets in lora.targets.items():
        if module not in family.modules:
            raise ConfigError(f"unknown module `{module}`", where=_WHERE, hint=did_you_mean(module, family.modules))
        chosen |= _chosen(model, family, module, targets)
    before = {name: module_of(name, model, family) for name, _ in model.named_parameters()}
    base = frozenset(name for name, module in before.items() if module in lora.targets)
    for name, linear in chosen.items():
        if lora.rank > (most := min(linear.weight.shape)):
            what = f"rank {lora.rank} is above the smaller side of `{name}` {list(linear.weight.shape)}"
            raise ConfigError(what, where="train.lora.rank", hint=f"at most {most}, or targets without it")
        adapt(linear, lora.rank, lora.scale, lora.dropout)
    shapes = {}
    for name, p in model.named_parameters():
        if name in base:
            p.requires_grad_(False)
        elif name not in before:
            shapes[name] = tuple(p.shape)
    return Adapters(shapes, base, lora.scale)


def module_of(name: str, model: nn.Module, family: Family) -> str:
    """The module that a parameter of a whole model belongs to, by its global name."""
    for module in family.towers:
        if any(name == path or name.startswith(f"{path}.") for path in _paths(model, family, module)):
            return module
    return LLM


def _chosen(model: nn.Module, family: Family, module: str, targets: Sequence[str]) -> dict[str, nn.Linear]:
    can = dict(_candidates(model, family, module))
    found: dict[str, nn.Linear] = {}
    for target in targets:
        meant = {name: linear for name, linear in can.items() if _is_meant(target, name)}
        if not meant:
            raise _matches_nothing(model, family, module, target, can)
        found |= meant
    if module == LLM:
        layers = f"{located(model, family.decoder.path)}.layers"
        bare = [
            number
            for number, _ in enumerate(model.get_submodule(layers).children())
            if not any(name.startswith(f"{layers}.{number}.") for name in found)
        ]
        if bare:
            of_bare = {n: linear for n, linear in can.items() if any(n.startswith(f"{layers}.{of}.") for of in bare)}
            raise ConfigError(
                f"layers {', '.join(map(str, bare))} of `{module}` would have no adapter", where=f"{_WHERE}.{module}",
                hint=f"add a target of these layers: {_kinds(of_bare)}",
            )  # fmt: skip
    return found


def _is_meant(target: str, name: str) -> bool:
    return target == ALL_LINEAR or target == name.rpartition(".")[2] or fnmatchcase(name, target)


def _matches_nothing(
    model: nn.Module, family: Family, module: str, target: str, can: Mapping[str, nn.Linear]
) -> ConfigError:
    inside = [name for name, _ in model.named_parameters() if module_of(name, model, family) == module]
    stacked = [name for name in inside if fnmatchcase(name, target) or target in name.split(".")]
    what = f"`{target}` names no Linear of `{module}`"
    if stacked:
        shape = list(model.get_parameter(stacked[0]).shape)
        what = f"`{target}` names `{stacked[0]}` {shape}, and only Linears of layers and encoders have adapters"
    return ConfigError(
        what, where=f"{_WHERE}.{module}", hint=f"{ALL_LINEAR}, {_kinds(can)}, or a pattern such as "
        f"`{_pattern(can)}`",
    )  # fmt: skip


def _kinds(can: Mapping[str, nn.Linear]) -> str:
    """Last names of the Linears, those that the most layers have first."""
    last = [name.rpartition(".")[2] for name in can]
    kinds = sorted(dict.fromkeys(kind for kind in last if not kind.isdigit()), key=lambda kind: -last.count(kind))
    return ", ".join(kinds[:_NUM_NAMED])


def _pattern(can: Mapping[str, nn.Linear]) -> str:
    name = next(iter(can), "layers.0.self_attn.q_proj")
    return f"*.{'.'.join(name.split('.')[-2:])}"


def _candidates(model: nn.Module, family: Family, module: str) -> Iterator[tuple[str, nn.Linear]]:
    """Linears that may have an adapter: whose modules call them, and do not compute with their weights otherwise."""
    for path in _paths(model, family, module):
        part = model.get_submodule(path) if _is_module(model, path) else nn.Module()
        refused: set[nn.Module] = set()
        for holder in part.modules():
            children = set(holder.children())
            if isinstance(holder, nn.MultiheadAttention) or (module == LLM and has_state(holder)):
                refused |= set(holder.modules())
            elif children & set(experts_of(holder)):
                refused |= children  # routers
        for name, linear in part.named_modules(prefix=path):
            if type(linear) is nn.Linear and linear not in refused:
                yield name, linear


def _is_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:  # a parameter: a newline embedding
        return False
    return True


def _paths(model: nn.Module, family: Family, module: str) -> tuple[str, ...]:
    """Where the Linears of a module are: of the LLM in its layers."""
    if module == LLM:
        return (f"{located(model, family.decoder.path)}.layers",)
    tower = family.towers[module]
    return (located(model, tower.path), *tower.extras)


class WithAdapters:
    """First weights of a model with adapters, read as those of a `WeightFolder`.

    A is drawn as `peft` draws it, uniformly within `1 / sqrt(in)`; B is zero, so that the model begins as its base.

    Args:
        weights: Of the base.
        adapters: Of the model.
        seed: Of the draws, which depend on it and the parameter's name alone.
        dtype: Of the model.
    """

    def __init__(self, weights: Weights, adapters: Adapters, seed: int, dtype: torch.dtype) -> None:
        self._weights, self._shapes, self._seed, self._dtype = weights, adapters.shapes, seed, dtype

    def read(self, name: str, axis: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """As of `WeightFolder`."""
        if name not in self._shapes:
            return self._weights.read(name, axis, ranges)
        whole = self._drawn(name)
        return whole if ranges is None else torch.cat([whole.narrow(axis, n, end - n) for n, end in ranges], axis)

    def _drawn(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith(_B):
            return torch.zeros(shape, dtype=self._dtype)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        most = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-most, most, generator=generator).to(self._dtype)


def merged(weights: Mapping[str, torch.Tensor], adapters: Adapters) -> dict[str, torch.Tensor]:
    """Parameters of the base with what the adapters add, in float32 before it is rounded to their type.

    Args:
        weights: Every parameter of the model with adapters, by global name.
        adapters: Of the model.
    """
    found = {name: tensor for name, tensor in weights.items() if name not in adapters.shapes}
    for linear in adapters.linears:
        a, b, weight = weights[f"{linear}{_A}"], weights[f"{linear}{_B}"], found[f"{linear}.weight"]
        wide = torch.promote_types(weight.dtype, torch.float32)
        added = adapters.scale * (b.to(wide) @ a.to(wide))
        found[f"{linear}.weight"] = (weight.to(wide) + added).to(weight.dtype)
    return found
