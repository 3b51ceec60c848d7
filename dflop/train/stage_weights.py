"""Fill a rank's stages with first weights: of its own tensors all, of those that ranks share its own part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from dflop.models.build import Stage
from dflop.models.weights import Weights, materialise
from dflop.parallel.part import Part


def fill_stages(
    stages: Iterable[Stage], parts: Mapping[str, Part], weights: Weights, device: torch.device
) -> None:  # fmt: skip
    """Give empty stages memory on a device, and weights.

    Args:
        stages: Of a model made by `build_empty`, cut and shared out.
        parts: What the rank holds of the parameters that it does not hold whole.
        weights: Of the model; files keep their types, stages that of the model.
        device: Where parameters are to be.

    Raises:
        ConfigError: a file cannot be read.
    """
    for stage in stages:
        made = materialise(stage, device)
        stage.names = {name: made.get(p, p) for name, p in stage.names.items()}
        for name, p in stage.names.items():
            part = parts.get(name)
            given = weights.read(name, part.axis, part.ranges) if part else weights.read(name)
            p.detach().copy_(given)
