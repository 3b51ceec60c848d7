"""Adapters as a folder of `peft`: `adapter_config.json`, which names the base, and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dflop import files
from dflop.config import Config
from dflop.errors import ConfigError
from dflop.models.lora import Adapters
from dflop.records import Plan
from dflop.run.batches import stages_of

_HINT = "dflop export RUN --out FOLDER --merged writes the whole model"
_PREFIX = "base_model.model."
"""In front of the model's own names."""


def check_adapters_alone(config: Config, plan: Plan) -> None:
    """Refuse what a folder of adapters cannot hold.

    Raises:
        ConfigError: modules without adapters train, or the base is in no folder.
    """
    assert config.train.lora is not None
    stages = stages_of(config)
    whole = [
        m.module for m in plan.modules
        if m.module not in config.train.lora.targets and not all(m.module in stage.frozen for stage in stages)
    ]  # fmt: skip
    if whole:
        raise ConfigError(
            f"`{'`, `'.join(whole)}` trained without adapters, which a folder of adapters cannot hold",
            where="train.lora.targets", hint=_HINT,
        )  # fmt: skip
    if config.model.weights is None:
        raise ConfigError("the base is random weights, which adapters cannot name", where="model.weights", hint=_HINT)


def write_adapters(
    config: Config, weights: Mapping[str, torch.Tensor], model: nn.Module, adapters: Adapters, folder: Path
) -> None:
    """Write the two files.

    Args:
        config: Of the run.
        weights: By global name; those of the adapters are written.
        model: Whole, with the adapters; it may be empty.
        adapters: Of the model.
        folder: Exists.

    Raises:
        OSError: a file cannot be written.
    """
    lora = config.train.lora
    assert lora is not None
    tensors = {f"{_PREFIX}{name}": weights[name].contiguous() for name in adapters.shapes}
    about: dict[str, Any] = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": str(config.model.weights),
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "bias": "none", "inference_mode": True,
        "target_modules": _targets(model, adapters.linears),
    }  # fmt: skip
    files.replace(folder / "adapter_config.json", json.dumps(about, indent=2) + "\n")
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    path.chmod((folder / "adapter_config.json").stat().st_mode)  # safetensors writes files that only their owner reads


def _targets(model: nn.Module, linears: Sequence[str]) -> list[str]:
    """Last names, where these mean no other modules of the model; or whole names."""
    kinds = {name.rpartition(".")[2] for name in linears}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in kinds}
    return sorted(kinds if meant == set(linears) else linears)
