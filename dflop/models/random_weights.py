"""Random first weights, drawn unit by unit: a rank draws what it holds and never has the whole model in memory.

A unit is a layer, or what stands outside of the layers: an embedding, a projector, the head. Each has a seed made of
the model's seed and the unit's name, so that its weights depend on neither the plan nor the rank that draws them. The
distributions are those of Hugging Face's `_init_weights`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.weights import materialise, some_of


class RandomWeights:
    """Random tensors by global name, read as those of a `WeightFolder`.

    Args:
        model: Whole model without memory, as `build_empty` makes it, which nobody else uses: units are drawn in it.
        seed: Of the model.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._name = {p: name for name, p in model.named_parameters()}
        self._unit_of: dict[str, _Unit] = {}
        for unit in _units(model, "", ()):
            for p in unit.parameters:
                self._unit_of.setdefault(self._name[p], unit)  # tied: the unit that has it first
        self._drawn: tuple[_Unit | None, dict[str, torch.Tensor]] = (None, {})

    def read(self, name: str, axis: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """A parameter, or parts of it along an axis; arguments as those of `WeightFolder.read`.

        A unit is drawn as a whole and kept until a parameter of another one is read.
        """
        unit = self._unit_of[name]
        if self._drawn[0] is not unit:
            self._drawn = (None, {})  # two units at once would be twice the memory
            self._drawn = (unit, self._draw(unit))
        whole = self._drawn[1][name]
        if ranges is None:
            return whole
        return torch.cat([whole.narrow(axis, first, end - first) for first, end in ranges], axis)

    def _draw(self, unit: _Unit) -> dict[str, torch.Tensor]:
        digest = hashlib.sha256(f"{self._seed} {unit.path}".encode()).digest()
        empty = [(module, dict(module._parameters)) for module in unit.modules]
        try:
            for module in unit.modules:
                for p in materialise(module, torch.device("cpu"), recurse=False).values():
                    p.detach().fill_(torch.nan)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8], "big"))
                unit.initialise()
            found = {
                self._name[p]: drawn.detach()
                for module, before in empty
                for key, p in before.items()
                if p is not None and (drawn := module._parameters[key]) is not None
            }
        finally:
            for module, before in empty:
                module._parameters = before
        if unset := some_of([name for name, drawn in found.items() if drawn.isnan().any()], "without first weights"):
            raise ConfigError(
                f"parameters that transformers does not initialise: {unset}", where="model.weights",
                hint="begin with the weights of a release",
            )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    path: str
    modules: tuple[nn.Module, ...]
    """Whose parameters are the unit's."""
    lineage: tuple[Any, ...]
    """From the model down to the unit."""

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for module in self.modules for p in module._parameters.values() if p is not None)

    def initialise(self) -> None:
        """As transformers' `initialize_weights`: inner modules first, each by the model that it is part of.

        What stands around the unit comes last and may set parameters of the unit; its others have no memory.
        """
        owners: list[Any] = []
        for module in self.lineage:
            owners.append(module if hasattr(module, "_init_weights") else owners[-1])
        inner, top = self.lineage[-1], owners[-1]
        if len(self.modules) > 1:
            for child in inner.children():
                _initialise(child, top)
        for module, owner in zip(reversed(self.lineage), reversed(owners), strict=True):
            owner._init_weights(module)


def _initialise(module: nn.Module, owner: Any) -> None:
    owner = module if hasattr(module, "_init_weights") else owner
    for child in module.children():
        _initialise(child, owner)
    owner._init_weights(module)


def _units(module: nn.Module, path: str, above: tuple[nn.Module, ...]) -> Iterator[_Unit]:
    lineage, prefix = (*above, module), f"{path}." if path else ""
    is_layer = bool(above) and isinstance(above[-1], nn.ModuleList)
    if is_layer or not any(isinstance(m, nn.ModuleList) for m in module.modules()):
        yield _Unit(path, tuple(module.modules()), lineage)
        return
    yield _Unit(path, (module,), lineage)
    for name, child in module.named_children():
        yield from _units(child, f"{prefix}{name}", lineage)
