"""What all microbatches of a rank have in common in a step, and do not in the next: noise of a second kind.

A checkpoint, a burst of another job, a warm core: they make a rank's whole step slower. Taken for errors of single
microbatches, dozens of which seem to agree, one such step would be proof that a module's level has moved or that a rank
is slow. How large it is follows from differences of successive steps, so that what stays (a slow rank, a wrong level)
is no noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflop.simulate.step import Node

START_SD, MAX_SD = 0.03, 0.15
"""Standard deviations of the relative error that a rank's microbatches share: at the start, at most."""
RATE = 0.05
NUM_SKIPPED = 2
"""Steps at the start in which predictions move too much to be compared with those of the step before."""
WILD = 9.0
"""A squared difference counts for at most so many times the usual: a change is no noise."""
LEAST_SD = 0.003


class SharedNoise:
    """Variance of the relative error that the microbatches of a rank share in a step, the same for all ranks."""

    def __init__(self) -> None:
        self._var = START_SD**2
        self._last: dict[Node, float] = {}
        self._num_steps = 0

    @property
    def var(self) -> float:
        """Variance of the relative error; 0 where steps vary no more than their microbatches explain."""
        return min(max(self._var, 0.0), MAX_SD**2)

    def observe(self, middles: Mapping[Node, tuple[float, float]]) -> None:
        """Take in one step.

        Args:
            middles: Per rank, the logarithm of measured to predicted seconds of its middle microbatch, and the variance
                that this has from the errors of single microbatches.
        """
        self._num_steps += 1
        seen = [
            min((log - self._last[node]) ** 2 / 2, WILD * (self.var + own_var + LEAST_SD**2)) - own_var
            for node, (log, own_var) in middles.items()
            if node in self._last
        ]
        self._last.update({node: log for node, (log, _) in middles.items()})
        num = self._num_steps - NUM_SKIPPED
        if seen and num > 0:
            self._var += max(1.0 / (num + 1), RATE) * (sum(seen) / len(seen) - self._var)

    def state(self) -> dict[str, Any]:
        """Everything that was learnt, for JSON."""
        last = [[list(node), log] for node, log in sorted(self._last.items())]
        return {"var": self._var, "num_steps": self._num_steps, "last": last}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._var, self._num_steps = float(state["var"]), int(state["num_steps"])
        self._last = {(str(m), int(s), int(r)): float(log) for (m, s, r), log in state["last"]}
