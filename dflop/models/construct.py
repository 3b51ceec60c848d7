"""Transformers' own model of a family, whole: its classes, and the model as it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dflop.models import attention
from dflop.models.family import Family
from dflop.models.generic import classes


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
