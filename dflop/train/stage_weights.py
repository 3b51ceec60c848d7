"""Fill a rank's stages from a folder of weights; a rank reads its own tensors, and its own part of those it shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from dflop.models.build import Stage
from dflop.models.weights import WeightFolder, materialise
from dflop.parallel.part import Part


def fill_stages(
    stages: Iterable[Stage], parts: Mapping[str, Part], weights: WeightFolder, device: torch.device
) -> None:  # fmt: skip
    """Give empty stages memory on a device, and weights.

    Args:
        stages: Of a model made by `build_empty`, cut and shared out.
        parts: What the rank holds of the parameters that it does not hold whole.
        weights: Read in the types of the files, kept in that of the model.
        device: Where parameters are to be.

    Raises:
        ConfigError: a file cannot be read.
    """
    for stage in stages:
        materialise(stage, device)
        for name, p in stage.names.items():
            part = parts.get(name)
            given = weights.read(name, part.axis, part.ranges) if part else weights.read(name)
            p.detach().copy_(given)
