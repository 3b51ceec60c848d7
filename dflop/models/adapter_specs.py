"""Modules with adapters as the planner sees them: how large the adapters of a layer are, and what they let it keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflop.models.build import located
from dflop.models.family import Family
from dflop.models.lora import Adapters, add_adapters, module_of
from dflop.models.splits import LORA_A, LORA_B, is_column_or_row, is_row
from dflop.models.weights import build_empty
from dflop.records import LLM, LayerKind, ModuleSpec

if TYPE_CHECKING:
    from dflop.config import LoraConfig  # the engine is measured on machines without pydantic


def adapted_specs(family: Family, lora: LoraConfig, dtype: str) -> tuple[ModuleSpec, ...]:
    """The family's specs with the sizes of adapters; takes seconds, as the model is built, without memory.

    Args:
        family: Of the model.
        lora: Which adapters.
        dtype: Of the model.

    Raises:
        ConfigError: as `add_adapters`.
    """
    model = build_empty(family, family.hf_config, getattr(torch, dtype))
    return with_adapters(family.specs(), model, family, add_adapters(model, family, lora))


def with_adapters(
    specs: Sequence[ModuleSpec], model: nn.Module, family: Family, adapters: Adapters
) -> tuple[ModuleSpec, ...]:
    """The specs with the sizes of a model's adapters; of layers that are alike but for these the largest.

    Args:
        specs: Of any modules of the model.
        model: Whole, with the adapters; it may be empty.
        family: Of the model.
        adapters: Of the model.
    """
    found = []
    for spec in specs:
        shapes = {n: shape for n, shape in adapters.shapes.items() if module_of(n, model, family) == spec.module}
        found.append(_with_adapters(spec, model, _path_of_layers(model, family, spec.module), shapes))
    return tuple(found)


def _with_adapters(
    spec: ModuleSpec, model: nn.Module, path: str, shapes: Mapping[str, tuple[int, ...]]
) -> ModuleSpec:  # fmt: skip
    if not shapes:
        return spec
    outside = sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith(f"{path}."))
    layers, runs, first = list(model.get_submodule(path).children()), [], 0
    for kind, num in spec.layers:
        kinds = [_adapted(kind, layer) for layer in layers[first : first + num]]
        runs.append((max(kinds, key=lambda of: (sum(map(sum, of.adapters)), of.num_adapter_values)), num))
        first += num
    return replace(spec, layers=tuple(runs), num_edge_adapter_params=outside)


def _adapted(kind: LayerKind, layer: nn.Module) -> LayerKind:
    pairs, num_values, of_rows = [], 0, 0
    inputs: dict[str, tuple[int, bool]] = {}  # of column-split Linears of one parent: width, and whether one keeps it
    for name, module in layer.named_modules():
        linear: Any = module
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in (LORA_A, LORA_B):
            continue
        has_adapter = hasattr(linear, LORA_A)
        if has_adapter:
            a, b = linear.lora_A.weight, linear.lora_B.weight
            num_values += len(a)
            of_rows += linear.in_features * is_row(name)
            shared, whole = (a, b) if is_row(name) else (b, a)
            pairs.append((shared.numel(), whole.numel()) if is_column_or_row(name) else (0, a.numel() + b.numel()))
        if is_column_or_row(name) and not is_row(name):
            parent = name.rpartition(".")[0]
            inputs[parent] = (linear.in_features, has_adapter or inputs.get(parent, (0, False))[1])
    missing = sum(width for width, is_kept in inputs.values() if not is_kept)
    kept = sum(width for width, is_kept in inputs.values() if is_kept) + of_rows
    return replace(
        kind, adapters=tuple(pairs), num_adapter_values=num_values - missing, num_adapter_inputs=num_values + kept
    )


def _path_of_layers(model: nn.Module, family: Family, module: str) -> str:
    if module == LLM:
        return f"{located(model, family.decoder.path)}.layers"
    tower = family.towers[module]
    return f"{located(model, tower.path)}.{tower.layers}"
