"""The model of a configuration: the arguments of Hugging Face's config class, and the first weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn

from dflop.config import Config
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError
from dflop.models.build import EncoderStage
from dflop.models.family import Family
from dflop.models.random_weights import RandomWeights
from dflop.models.weights import WeightFolder, Weights, build_empty


def full_config(family: Family, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Keyword arguments of the family's config class, with the tokenizer's ids of special tokens."""
    return {**family.hf_config, **family.token_ids(tokenizer.special_ids)}


def first_weights(config: Config, family: Family, tokenizer: ChatTokenizer) -> tuple[nn.Module, Weights]:
    """The whole model without memory, and its first weights: those of `model.weights`, or random ones.

    A rank that reads its own never holds more, but for one layer's while they are drawn. Random ones do not depend on
    the plan.

    Raises:
        ConfigError: the weights of `model.weights` are another model's.
    """
    hf_config, dtype = full_config(family, tokenizer), getattr(torch, config.model.dtype)
    model = build_empty(family, hf_config, dtype)
    if config.model.weights is None:
        # Units are drawn in a model of their own, as stages are cut out of the other.
        return model, RandomWeights(build_empty(family, hf_config, dtype), config.model.seed)
    num_rows = cast(Any, model).get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the weights have room for {num_rows}",
            where="model.weights",
            hint="use the tokenizer.json of the weights",
        )
    return model, WeightFolder(config.model.weights, model)


def untrained_weights(
    config: Config, family: Family, tokenizer: ChatTokenizer, modules: Collection[str]
) -> dict[str, torch.Tensor]:
    """First weights of encoders that a plan leaves out since the data has nothing for them, by global name.

    Raises:
        ConfigError: the weights of `model.weights` are another model's.
    """
    if not modules:
        return {}
    empty, weights = first_weights(config, family, tokenizer)
    names = [name for module in modules for name in EncoderStage(empty, family.towers[module]).names]
    return {name: weights.read(name) for name in names}
