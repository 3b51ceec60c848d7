"""Whether factors by size pay: a switch that turns on evidence and not on noise.

A reading is the gain that a plan with factors has in one step. It must come from two halves of the data: factors of
one half make the plan, factors of the other score it. A plan scored by the factors that made it always looks better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SMOOTHING = 0.15
"""Weight of the newest reading once enough were seen."""
MIN_READINGS = 4
MIN_READINGS_OF_LARGE_GAIN = 2
LARGE_GAIN_FRAC = 0.1
"""A gain that is worth going by fewer readings: at the start every step without it costs that much."""
NUM_STDERR = 2.0
ON_FRAC = 0.003
OFF_FRAC = 0.001
"""Lower than what turns it on, so that a gain at the edge does not switch it every step."""


class Gate:
    """Exponential average of readings and its standard error; on above a threshold, off below a lower one.

    Args:
        is_on: Before the first reading.
    """

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self.num_readings = 0
        self.mean_gain_frac = 0.0
        self._variance = 0.0
        self._sum_sq_weights = 1.0

    @property
    def stderr_frac(self) -> float:
        """Of the mean, as if readings were independent; infinite until there are two."""
        if self.num_readings < 2:
            return math.inf
        return math.sqrt(self._variance / (1.0 - self._sum_sq_weights) * self._sum_sq_weights)

    def read(self, gain_frac: float, cost_frac: float) -> bool:
        """Take in one step's reading; one that is not a number is not one.

        Args:
            gain_frac: Of the step: what a plan with factors saves; negative where it loses.
            cost_frac: Of the step: what making corrected plans takes beyond plans without.

        Returns:
            Whether the gate switched.
        """
        if not math.isfinite(gain_frac):
            return False
        self._average(gain_frac)
        was_on, net_frac = self.is_on, self.mean_gain_frac - cost_frac
        if was_on:
            self.is_on = self.num_readings < MIN_READINGS or net_frac > OFF_FRAC
        else:
            enough = MIN_READINGS_OF_LARGE_GAIN if net_frac > LARGE_GAIN_FRAC else MIN_READINGS
            self.is_on = self.num_readings >= enough and net_frac > max(ON_FRAC, NUM_STDERR * self.stderr_frac)
        return self.is_on != was_on

    def state(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "is_on": self.is_on,
            "num_readings": self.num_readings,
            "mean_gain_frac": self.mean_gain_frac,
            "variance": self._variance,
            "sum_sq_weights": self._sum_sq_weights,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.is_on = bool(state["is_on"])
        self.num_readings = int(state["num_readings"])
        self.mean_gain_frac = float(state["mean_gain_frac"])
        self._variance = float(state["variance"])
        self._sum_sq_weights = float(state["sum_sq_weights"])

    def _average(self, gain_frac: float) -> None:
        """A plain mean at first, later an exponential one; with the variance of readings about it."""
        self.num_readings += 1
        weight = max(1.0 / self.num_readings, SMOOTHING)
        error = gain_frac - self.mean_gain_frac
        self.mean_gain_frac += weight * error
        self._variance = (1.0 - weight) * (self._variance + weight * error**2)
        self._sum_sq_weights = (1.0 - weight) ** 2 * self._sum_sq_weights + weight**2
