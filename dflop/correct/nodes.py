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

START_SD, DRIFT_SD, STEP_SD = 0.3, 0.005, 0.01
"""Standard deviations of a factor's logarithm: prior, drift per step, and noise of one step of a rank."""
MAX_SURPRISE = 3.0
"""Standard deviations that one step counts for at most; two in a row beyond it, and the rank has changed."""
DEAD_ZONE_FRAC = 0.05
NUM_SD, SURE_STEPS = 3.0, 3
"""A factor is applied when it was beyond so many standard deviations, and the dead zone, in so many steps in a row."""
SLOW_FRAC, NUM_SD_SLOW, SLOW_STEPS = 0.15, 3.0, 5
"""A rank is called slow when it was so much slower in so many steps in a row."""


@dataclass(frozen=True, slots=True)
class NodeBelief:
    """What is known of the ranks at one place of a plan."""

    factor: float
    """Ratio of their seconds to the module's."""
    sd: float
    in_force: float
    """What should be applied: 1 within the dead zone, and until that is sure."""
    is_slow: bool
    num_steps: int


@dataclass(slots=True)
class _State:
    log_factor: float = 0.0
    variance: float = START_SD**2
    num_steps: int = 0
    num_surprises: int = 0
    """Steps in a row, negative where they were faster than believed."""
    num_sure: int = 0
    """Steps in a row in which the factor was beyond the dead zone."""
    num_slow: int = 0
    """Steps in a row."""
    taken: float = 1.0
    """Factor that the rank's seconds are divided by; 1 within the dead zone."""


class NodeFactors:
    """A factor per place of a plan, 1 for the median; where a module has one place only there is nothing to compare."""

    def __init__(self) -> None:
        self._states: dict[Node, _State] = {}

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
            variance = sd**2 + reference_sd**2 + STEP_SD**2
            _update(self._states.setdefault(node, _State()), log - reference, variance)

    def taken(self, node: Node) -> float:
        """Factor to divide a rank's seconds by before sizes are learnt from them: as soon as it is likely."""
        state = self._states.get(node)
        return 1.0 if state is None else state.taken

    def beliefs(self) -> dict[Node, NodeBelief]:
        """Beliefs about every node that was ever compared."""
        return {
            node: NodeBelief(
                factor=math.exp(s.log_factor),
                sd=math.exp(s.log_factor) * math.sqrt(s.variance),
                in_force=s.taken if s.num_sure >= SURE_STEPS else 1.0,
                is_slow=s.num_slow >= SLOW_STEPS,
                num_steps=s.num_steps,
            )
            for node, s in sorted(self._states.items())
        }

    def state(self) -> list[Any]:
        """Everything that was learnt, for JSON."""
        return [[list(node), asdict(state)] for node, state in sorted(self._states.items())]

    def load(self, state: list[Any]) -> None:
        """Go on from what `state` gave."""
        self._states = {(str(m), int(s), int(r)): _State(**fields) for (m, s, r), fields in state}


def _update(state: _State, observed: float, variance: float) -> None:
    """Kalman update of one logarithm, with the surprise of a single step limited."""
    state.variance = min(state.variance + DRIFT_SD**2, START_SD**2)
    error, sd = observed - state.log_factor, math.sqrt(state.variance + variance)
    if abs(error) <= MAX_SURPRISE * sd:
        state.num_surprises = 0
    else:
        before = state.num_surprises if state.num_surprises * error > 0 else 0
        state.num_surprises = before + (1 if error > 0 else -1)
        if abs(state.num_surprises) >= 2:
            state.variance, state.num_surprises = START_SD**2, 0
        else:
            error = math.copysign(MAX_SURPRISE * sd, error)
    gain = state.variance / (state.variance + variance)
    state.log_factor += gain * error
    state.variance *= 1.0 - gain
    state.num_steps += 1
    sd = math.sqrt(state.variance)
    is_slow = state.log_factor > max(math.log1p(SLOW_FRAC), NUM_SD_SLOW * sd)
    state.num_slow = state.num_slow + 1 if is_slow else 0
    is_sure = abs(state.log_factor) > max(math.log1p(DEAD_ZONE_FRAC), NUM_SD * sd)
    state.num_sure = state.num_sure + 1 if is_sure else 0
    target = state.log_factor if is_sure else 0.0
    if abs(target - math.log(state.taken)) > 0.5 * math.log1p(DEAD_ZONE_FRAC):
        state.taken = math.exp(target)
