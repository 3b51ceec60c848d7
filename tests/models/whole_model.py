"""A family's whole model on one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dflop.models.family import Family
from dflop.models.random_weights import RandomWeights
from dflop.models.weights import build_empty, materialise


def build_model(family: Family, hf_config: Mapping[str, Any], *, seed: int, dtype: torch.dtype) -> nn.Module:
    """The family's whole `...ForConditionalGeneration` with random weights fixed by `seed`.

    Args:
        family: Names the transformers classes.
        hf_config: Keyword arguments of the config class, token ids included.
        seed: Same seed, same weights, on every machine with the same torch build.
        dtype: Parameter type.
    """
    model, weights = build_empty(family, hf_config, dtype), RandomWeights(build_empty(family, hf_config, dtype), seed)
    materialise(model, torch.device("cpu"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights.read(name))
    return model
