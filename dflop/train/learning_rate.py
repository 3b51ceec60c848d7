"""Learning rate of a step: linear warm-up, then a decay, both within one stage of training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflop.config import TrainConfig  # the engine is measured on machines without pydantic


def learning_rate(done: int, num_steps: int, peak: float, settings: TrainConfig) -> float:
    """Rate of the step after `done` steps of a stage.

    Args:
        done: Steps of the stage before this one.
        num_steps: Of the stage.
        peak: Rate at the end of the warm-up.
        settings: Length of the warm-up, form and floor of the decay. `cosine` and `linear` fall from the warm-up to the
            last step; `wsd` (warm-up, stable, decay: Hu et al., arXiv 2404.06395, section 4) falls linearly in the last
            steps alone; `constant` stays.
    """
    warmup, floor = settings.warmup_steps, settings.lr_floor_frac
    if done < warmup:
        return peak * (done + 1) / warmup
    begin = warmup
    if settings.lr_decay == "wsd":
        begin = max(warmup, num_steps - max(1, round(settings.lr_decay_frac * num_steps)))
    progress = min(max(0, done - begin) / max(1, num_steps - begin), 1.0)
    match settings.lr_decay:
        case "cosine":
            fallen = (1 - math.cos(math.pi * progress)) / 2
        case "linear" | "wsd":
            fallen = progress
        case "constant":
            fallen = 0.0
    return peak * (1 - (1 - floor) * fallen)
