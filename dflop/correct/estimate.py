"""How far each module's predicted seconds are off, learnt from what a run measures.

One factor per module, estimated in log space (a 2x over- and under-prediction are equally wrong). A step contributes
the median over its spans, so that a straggling microbatch does not count; a mean with one pseudo-observation of "the
prediction is right" starts the estimate, an exponential average follows drift. Factors within 3 % of what is in force
are not emitted: acting on noise costs more than it gains (0.6-1.5 % of a step in simulation).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflop.records import Correction, StepObservation

MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
DEAD_ZONE_FRAC = 0.03
SMOOTHING = 0.15
"""Weight of the newest step once enough were seen."""
WINDOW_STEPS = 32
"""Steps over which the residual of the uncorrected prediction is reported."""


@dataclass(slots=True)
class _ModuleState:
    log_factor: float
    in_force: list[tuple[int, float]]
    """(effective_step, factor), ascending: what the predictions of a step already include."""
    num_steps: int = 0
    num_spans: int = 0
    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """Per step, the log ratio of measured to uncorrected seconds."""


class ModuleCorrector:
    """Learns one factor per module and says when it should change.

    Args:
        table_ids: Cost table in use, per module that may be corrected.
        factors: Factors already in force (a resumed run); 1.0 where absent.
    """

    def __init__(self, table_ids: Mapping[str, str], factors: Mapping[str, float] | None = None) -> None:
        self._table_ids = dict(table_ids)
        initial = {module: (factors or {}).get(module, 1.0) for module in table_ids}
        self._states = {module: _ModuleState(math.log(f), [(0, f)]) for module, f in initial.items()}
        self._first_step: dict[int, int] = {}

    @property
    def factors(self) -> dict[str, float]:
        """The newest factor emitted per module."""
        return {module: state.in_force[-1][1] for module, state in self._states.items()}

    def observe(self, observations: Sequence[StepObservation]) -> None:
        """Learn from one step: the observations of as many ranks as are at hand.

        The first step of an attempt is ignored: lazy initialisation and page faults make it slow in every module.
        """
        ratios: dict[str, list[float]] = {}
        for seen in observations:
            if seen.step <= self._first_step.setdefault(seen.attempt, seen.step) or seen.module not in self._states:
                continue
            active = math.log(self._factor_at(seen.module, seen.step))
            for span in seen.spans:
                measured_s = span.forward_compute_s + span.backward_compute_s
                predicted_s = span.predicted_forward_s + span.predicted_backward_s
                if measured_s > 0 and predicted_s > 0:
                    ratios.setdefault(seen.module, []).append(math.log(measured_s / predicted_s) + active)
        for module, logs in ratios.items():
            _update(self._states[module], logs)

    def corrections(self, run_id: str, effective_step: int, now_s: float) -> list[Correction]:
        """Corrections that should replace those in force from `effective_step` on; empty when nothing changed by 3 %.

        The caller promises that steps from `effective_step` on are predicted with them.
        """
        found = []
        for module, state in self._states.items():
            if abs(state.log_factor - math.log(state.in_force[-1][1])) <= math.log1p(DEAD_ZONE_FRAC):
                continue
            factor = math.exp(state.log_factor)
            state.in_force.append((effective_step, factor))
            found.append(
                Correction(
                    run_id=run_id,
                    effective_step=effective_step,
                    module=module,
                    table_id=self._table_ids[module],
                    factor=factor,
                    residual_frac=statistics.median(abs(math.exp(-log) - 1.0) for log in state.window),
                    num_observations=state.num_spans,
                    observed_at_s=now_s,
                )
            )
        return found

    def _factor_at(self, module: str, step: int) -> float:
        in_force = self._states[module].in_force
        return next((factor for since, factor in reversed(in_force) if since <= step), in_force[0][1])


def _update(state: _ModuleState, logs: list[float]) -> None:
    observed = min(max(statistics.median(logs), math.log(MIN_FACTOR)), math.log(MAX_FACTOR))
    state.num_steps += 1
    state.num_spans += len(logs)
    state.window.append(observed)
    gain = max(1.0 / (state.num_steps + 1), SMOOTHING)
    state.log_factor += gain * (observed - state.log_factor)
