"""Ranks that take longer for the same work than their peers.

What a rank takes relative to the corrected prediction, compared with the lower median of its peers: what all have in
common is the prediction's fault and not theirs. Peers are the ranks of a module, or, where a stage holds several
modules, those of the same stage: another one has another mix, and looks slow when only a module is. One slow step
means nothing (a checkpoint, another job's burst); a rank is called slow when it stays so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dflop.simulate.step import Node

START_SD, DRIFT_SD = 0.3, 0.005
"""Of the logarithm of a factor: before anything is known, and per step."""
MAX_SURPRISE = 3.0
"""Standard deviations that one step counts for at most; two in a row beyond it, and the rank has changed."""
DEAD_ZONE_FRAC = 0.05
NUM_SD, SURE_STEPS = 3.0, 3
"""A factor is applied when it was beyond so many standard deviations, and the dead zone, in so many steps in a row."""
SLOW_FRAC, NUM_SD_SLOW, SLOW_STEPS = 0.15, 3.0, 5
"""A rank is called slow when it was so much slower in so many steps in a row."""


@dataclass(slots=True)
class NodeBelief:
    """What is known of the ranks at one place of a plan: a factor on their seconds against their module's."""

    log_factor: float = 0.0
    variance: float = START_SD**2
    num_surprises: int = 0
    """Steps in a row, negative where they were faster than believed."""
    num_sure: int = 0
    """Steps in a row in which the factor was beyond the dead zone."""
    num_slow: int = 0
    """Steps in a row."""
    taken: float = 1.0
    """What their seconds are divided by before sizes are learnt from them, as soon as it is likely; else 1."""

    @property
    def factor(self) -> float:
        """As believed."""
        return math.exp(self.log_factor)

    @property
    def sd(self) -> float:
        """Of the factor."""
        return self.factor * math.sqrt(self.variance)

    @property
    def in_force(self) -> float:
        """Factor that should be applied: 1 within the dead zone, and until that is sure."""
        return self.taken if self.num_sure >= SURE_STEPS else 1.0

    @property
    def is_slow(self) -> bool:
        """Whether people should know."""
        return self.num_slow >= SLOW_STEPS

    def update(self, observed: float, variance: float) -> None:
        """Kalman update of the logarithm, with the surprise of a single step limited."""
        self.variance = min(self.variance + DRIFT_SD**2, START_SD**2)
        error, sd = observed - self.log_factor, math.sqrt(self.variance + variance)
        if abs(error) <= MAX_SURPRISE * sd:
            self.num_surprises = 0
        else:
            before = self.num_surprises if self.num_surprises * error > 0 else 0
            self.num_surprises = before + (1 if error > 0 else -1)
            if abs(self.num_surprises) >= 2:
                self.variance, self.num_surprises = START_SD**2, 0
            else:
                error = math.copysign(MAX_SURPRISE * sd, error)
        gain = self.variance / (self.variance + variance)
        self.log_factor += gain * error
        self.variance *= 1.0 - gain
        sd = math.sqrt(self.variance)
        is_slow = self.log_factor > max(math.log1p(SLOW_FRAC), NUM_SD_SLOW * sd)
        self.num_slow = self.num_slow + 1 if is_slow else 0
        is_sure = abs(self.log_factor) > max(math.log1p(DEAD_ZONE_FRAC), NUM_SD * sd)
        self.num_sure = self.num_sure + 1 if is_sure else 0
        target = self.log_factor if is_sure else 0.0
        if abs(target - math.log(self.taken)) > 0.5 * math.log1p(DEAD_ZONE_FRAC):
            self.taken = math.exp(target)


class NodeFactors:
    """A factor per place of a plan, 1 for the median; where a module has one place only there is nothing to compare."""

    def __init__(self) -> None:
        self.beliefs: dict[Node, NodeBelief] = {}
        """Of every node that was ever compared."""

    def observe(self, log_ratios: Mapping[Node, tuple[float, float]]) -> None:
        """Take in one step.

        Args:
            log_ratios: Per node of some that can be compared, the logarithm of measured to predicted seconds and its
                standard deviation.
        """
        if len(log_ratios) < 2:
            return
        reference, reference_sd = sorted(log_ratios.values())[(len(log_ratios) - 1) // 2]
        for node, (log, sd) in log_ratios.items():
            self.beliefs.setdefault(node, NodeBelief()).update(log - reference, sd**2 + reference_sd**2)

    def state(self) -> list[Any]:
        """Everything that was learnt, for JSON."""
        return [[list(node), asdict(belief)] for node, belief in sorted(self.beliefs.items())]

    def load(self, state: list[Any]) -> None:
        """Go on from what `state` gave."""
        self.beliefs = {(str(m), int(s), int(r)): NodeBelief(**fields) for (m, s, r), fields in state}
