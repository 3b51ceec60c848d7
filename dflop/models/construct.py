"""Transformers' own model of a family, whole: its classes, and the model as it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dflop.models import attention
from dflop.models.family import GENERIC, Family
from dflop.models.fusing import fuse
from dflop.models.generic import classes


def hf_types(family: Family, hf_config: Mapping[str, Any]) -> tuple[Any, Any]:
    """(config, class of the model) of transformers.

    Args:
        family: Names the classes, or leaves it to the config's `model_type`.
        hf_config: Keyword arguments of the config class, token ids included.
    """
    import transformers

    if family.decoder.rope == GENERIC:
        config = classes.config_of(hf_config)
        return config, classes.class_of(config)
    return getattr(transformers, family.config_class)(**hf_config), getattr(transformers, family.model_class)


def construct(family: Family, hf_config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The family's model in training mode, with packed attention and layers that keep little.

    Args:
        family: As for `hf_types`.
        hf_config: As for `hf_types`.
        dtype: Parameter type.
    """
    attention.register()
    config, model_class = hf_types(family, hf_config)
    if family.decoder.rope == GENERIC:
        return classes.construct(config, dtype).train()
    model: nn.Module = model_class._from_config(config, attn_implementation=attention.PACKED, dtype=dtype)
    fuse(model)
    return model.train()
