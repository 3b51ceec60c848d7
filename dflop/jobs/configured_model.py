"""The model of a configuration: what Hugging Face is told of it, and a rank's stages with their first weights."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from dflop.config import Config
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.build import EncoderStage, Stage
from dflop.models.family import Family
from dflop.models.random_weights import RandomWeights
from dflop.models.weights import WeightFolder, Weights, build_empty
from dflop.parallel.part import Part
from dflop.parallel.topology import Seat
from dflop.train.stages import fill_stages, make_stages


def full_config(family: Family, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Keyword arguments of the family's config class, with the tokenizer's ids of special tokens."""
    return {**family.hf_config, **family.token_ids(tokenizer.special_ids)}


def build_stages(
    config: Config, family: Family, tokenizer: ChatTokenizer, seat: Seat, tensor_group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[tuple[Stage, ...], dict[str, Part]]:  # fmt: skip
    """Stages of a seat on their device, with the weights of `model.weights` or random ones, as `make_stages`.

    A rank never holds more weights than its own, and one layer's while they are drawn. Random ones do not depend on the
    plan.

    Raises:
        ConfigError: the model cannot be cut as the plan wants it, or the weights are another model's.
    """
    hf_config, dtype = full_config(family, tokenizer), getattr(torch, config.model.dtype)
    model = build_empty(family, hf_config, dtype)
    num_rows = cast(Any, model).get_input_embeddings().num_embeddings
    if config.model.weights is not None and tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the weights have room for {num_rows}",
            where="model.weights",
            hint="use the tokenizer.json of the weights",
        )
    weights = _first_weights(config, family, hf_config, model)
    stages, parts = make_stages(model, family, seat, tensor_group)
    fill_stages(stages, parts, weights, device)
    kernel = attention.resolve(config.model.attention, device.type, dtype)
    if seat.rank == 0:
        print(f"attention: {kernel}", file=sys.stderr, flush=True)
    for stage in stages:
        stage.to(device)
        attention.use(stage, kernel)
    return stages, parts


def untrained_weights(
    config: Config, family: Family, tokenizer: ChatTokenizer, modules: Collection[str]
) -> dict[str, torch.Tensor]:
    """First weights of encoders that a plan leaves out since the data has nothing for them, by global name.

    Raises:
        ConfigError: the weights of `model.weights` are another model's.
    """
    if not modules:
        return {}
    hf_config = full_config(family, tokenizer)
    empty = build_empty(family, hf_config, getattr(torch, config.model.dtype))
    weights = _first_weights(config, family, hf_config, empty)
    names = [name for module in modules for name in EncoderStage(empty, family.towers[module]).names]
    return {name: weights.read(name) for name in names}


def _first_weights(config: Config, family: Family, hf_config: dict[str, Any], model: nn.Module) -> Weights:
    """Of `model.weights`, or random ones; `model` is whole and without memory.

    Raises:
        ConfigError: the weights of `model.weights` are another model's.
    """
    if config.model.weights is not None:
        return WeightFolder(config.model.weights, model)
    # Units are drawn in a model of their own, as stages are cut out of the other.
    return RandomWeights(build_empty(family, hf_config, getattr(torch, config.model.dtype)), config.model.seed)
