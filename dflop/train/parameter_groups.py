"""Which parameters are updated by Muon, and with another learning rate or weight decay than the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dflop.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from dflop.config import GroupConfig  # the engine is measured on machines without pydantic

NORMS, BIASES, EMBEDDINGS = "norms", "biases", "embeddings"
MUON = "muon"
HEAD = "lm_head.weight"
_EMBEDDING = re.compile(r"(^|[._])(embed\w*|wte|wpe)([._]|$)")


def numbers_of(
    rules: Sequence[GroupConfig], weight_decay: float, module: str, name: str, num_dims: int
) -> tuple[float, float]:
    """(factor on the learning rate, weight decay) of a parameter; of rules that give a number the last one counts.

    Args:
        rules: In the order of the configuration.
        weight_decay: Of parameters that no rule names.
        module: That the parameter belongs to.
        name: Its global name.
        num_dims: Its dimensions.
    """
    scale = 1.0
    for rule in rules:
        if any(_is_meant(target, module, name, num_dims) for target in rule.targets):
            scale = scale if rule.lr_scale is None else rule.lr_scale
            weight_decay = weight_decay if rule.weight_decay is None else rule.weight_decay
    return scale, weight_decay


def is_hidden_matrix(name: str, num_dims: int) -> bool:
    """Whether a parameter is what Muon is for: a matrix that is no embedding and not the head."""
    return num_dims == 2 and _EMBEDDING.search(name) is None and not name.endswith(HEAD)


def check_targets(rules: Iterable[GroupConfig], modules: Collection[str], parameters: Collection[str] = ()) -> None:
    """Every target names a module, a kind, or a parameter.

    Args:
        rules: Of the configuration.
        modules: Of the model.
        parameters: global names of the whole model's; without them patterns are passed over.

    Raises:
        ConfigError: one names nothing.
    """
    words = {*modules, NORMS, BIASES, EMBEDDINGS}
    for number, rule in enumerate(rules):
        for target in rule.targets:
            is_pattern = not target.isidentifier()
            if target in words or (is_pattern and not parameters):
                continue
            if not any(fnmatchcase(name, target) for name in parameters):
                hint = "or a pattern of names such as `*.layers.0.*`"
                names = f"; names begin like `{next(iter(parameters))}`" if is_pattern else ""
                raise ConfigError(
                    f"`{target}` names no parameter of the model{names}", where=f"train.groups.{number}.targets",
                    hint=f"{did_you_mean(target, words)}, {hint}",
                )  # fmt: skip


def _is_meant(target: str, module: str, name: str, num_dims: int) -> bool:
    is_bias = name.endswith("bias")
    if target == NORMS:  # and what is like them: scales of layers, decays of states
        return num_dims < 2 and not is_bias
    if target == BIASES:
        return num_dims < 2 and is_bias
    if target == EMBEDDINGS:
        return _EMBEDDING.search(name) is not None
    return target == module or fnmatchcase(name, target)
