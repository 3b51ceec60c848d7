"""How far each module's predicted seconds are off, learnt from what a run measures.

One factor per module, estimated in log space (a 2x over- and under-prediction are equally wrong). A step contributes
the median over its spans, so that a straggling microbatch does not count; a mean with one pseudo-observation of "the
prediction is right" starts the estimate, an exponential average follows drift. Factors within 3 % of what is in force
are not emitted: acting on noise costs more than it gains (0.6-1.5 % of a step in simulation).

What several modules took together on one stage is told apart first (`attribute.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dflop.correct.attribute import StageTime, module_factors
from dflop.records import Correction, StepObservation

MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
DEAD_ZONE_FRAC = 0.03
SMOOTHING = 0.15
"""Weight of the newest step once enough were seen."""
SpanKey = tuple[str, int, int, int]
"""(module, stage, dp rank, microbatch)."""
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

    def observe(
        self, observations: Sequence[StepObservation], shares: Mapping[SpanKey, Mapping[str, float]] | None = None
    ) -> None:
        """Learn from one step: the observations of as many ranks as are at hand.

        The first step of an attempt is ignored: lazy initialisation and page faults make it slow in every module.

        Args:
            observations: Of one step.
            shares: Predicted seconds per module of every span, where stages hold several modules; nothing is learnt
                from spans that are missing. None: every stage holds the module that its observations name.
        """
        times = [
            time
            for seen in observations
            if seen.step > self._first_step.setdefault(seen.attempt, seen.step)
            for time in self._times(seen, shares)
        ]
        mixed = {module for time in times if len(time.expected_s) > 1 for module in time.expected_s}
        self._learn_alone(times, mixed)
        if mixed:
            self._learn_together([time for time in times if mixed & time.expected_s.keys()], sorted(mixed))

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

    def _times(
        self, seen: StepObservation, shares: Mapping[SpanKey, Mapping[str, float]] | None
    ) -> Iterator[StageTime]:
        """What there is to learn from of one rank's step."""
        for span in seen.spans:
            predicted_s: Mapping[str, float] = {seen.module: span.predicted_forward_s + span.predicted_backward_s}
            if shares is not None:
                predicted_s = shares.get((seen.module, seen.stage, seen.dp_rank, span.microbatch), {})
            working = {module: seconds for module, seconds in predicted_s.items() if seconds > 0}
            measured_s = span.forward_compute_s + span.backward_compute_s
            if measured_s > 0 and working and working.keys() <= self._states.keys():
                yield StageTime(measured_s, {m: s / self._factor_at(m, seen.step) for m, s in working.items()})

    def _learn_alone(self, times: Sequence[StageTime], mixed: Collection[str]) -> None:
        """From the spans of modules that never share a stage."""
        ratios: dict[str, list[float]] = {}
        for time in times:
            for module, expected_s in time.expected_s.items():
                if module not in mixed:
                    ratios.setdefault(module, []).append(math.log(time.measured_s / expected_s))
        for module, logs in ratios.items():
            _update(self._states[module], statistics.median(logs), len(logs))

    def _learn_together(self, times: Sequence[StageTime], modules: Sequence[str]) -> None:
        """From the spans of modules that share a stage somewhere."""
        factors = module_factors(times, {module: math.exp(self._states[module].log_factor) for module in modules})
        for module, factor in factors.items():
            num_spans = sum(module in time.expected_s for time in times)
            _update(self._states[module], math.log(max(factor, MIN_FACTOR)), num_spans)

    def _factor_at(self, module: str, step: int) -> float:
        in_force = self._states[module].in_force
        return next((factor for since, factor in reversed(in_force) if since <= step), in_force[0][1])


def _update(state: _ModuleState, observed: float, num_spans: int) -> None:
    """Take in the logarithm of the factor that the spans of one step speak for."""
    observed = min(max(observed, math.log(MIN_FACTOR)), math.log(MAX_FACTOR))
    state.num_steps += 1
    state.num_spans += num_spans
    state.window.append(observed)
    gain = max(1.0 / (state.num_steps + 1), SMOOTHING)
    state.log_factor += gain * (observed - state.log_factor)
