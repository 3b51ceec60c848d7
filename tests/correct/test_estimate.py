from __future__ import annotations

import math

import numpy as np
import pytest

from dflop.correct.estimate import ModuleCorrector
from dflop.records import MicrobatchSpan, StepObservation


def observation(
    step: int, module: str, predicted_s: float, measured_s: list[float], attempt: int = 0
) -> StepObservation:
    spans = tuple(
        MicrobatchSpan(
            k, 1, 10, 100, predicted_s / 3, predicted_s * 2 / 3, 0.0, s / 3, 0.0, s * 2 / 3, s / 3, s * 2 / 3
        )
        for k, s in enumerate(measured_s)
    )
    return StepObservation(
        run_id="run",
        attempt=attempt,
        step=step,
        policy="balanced",
        rank=0,
        module=module,
        stage=0,
        dp_rank=0,
        predicted_step_s=1.0,
        step_s=1.0,
        busy_s=1.0,
        data_wait_s=0.0,
        schedule_wait_s=0.0,
        reduce_s=0.0,
        optimizer_s=0.0,
        loss=math.nan,
        grad_norm=0.0,
        num_supervised_tokens=1,
        observed_at_s=0.0,
        spans=spans,
    )


def run(corrector: ModuleCorrector, steps: range, truth: dict[str, float], noise_frac: float = 0.0, lag: int = 2):
    """Steps predicted with the factors in force, each correction taking effect `lag` steps after it is made."""
    rng, pending, emitted = np.random.default_rng(0), [], []
    in_force = dict(corrector.factors)
    for step in steps:
        for correction in [c for c in pending if c.effective_step == step]:
            in_force[correction.module] = correction.factor
        corrector.observe(
            [
                observation(step, m, 0.1 * in_force[m], list(0.1 * t * rng.normal(1.0, noise_frac, 4)))
                for m, t in truth.items()
            ]
        )
        made = corrector.corrections("run", step + lag, now_s=float(step))
        pending += made
        emitted += made
    return emitted


def test_converges_to_a_misprediction_and_leaves_the_right_module_alone():
    corrector = ModuleCorrector({"vision": "t1", "llm": "t2"})
    emitted = run(corrector, range(30), {"vision": 1.0, "llm": 1.5}, noise_frac=0.01)
    assert corrector.factors["llm"] == pytest.approx(1.5, rel=0.04)
    assert {c.module for c in emitted} == {"llm"}
    last = emitted[-1]
    assert (last.table_id, last.run_id) == ("t2", "run")
    assert last.residual_frac == pytest.approx(1 / 3, abs=0.02)
    assert last.num_observations > 4


def test_settles_instead_of_compounding():
    emitted = run(ModuleCorrector({"llm": "t"}), range(60), {"llm": 1.5})
    assert max(c.factor for c in emitted) <= 1.5 + 1e-9
    assert emitted[-1].effective_step < 40


def test_no_correction_when_the_prediction_is_right():
    assert run(ModuleCorrector({"llm": "t"}), range(50), {"llm": 1.0}, noise_frac=0.03) == []


def test_one_straggling_span_is_ignored():
    corrector = ModuleCorrector({"llm": "t"})
    for step in range(10):
        corrector.observe([observation(step, "llm", 0.1, [0.1, 0.1, 2.0, 0.1])])
    assert corrector.corrections("run", 10, 0.0) == []


def test_first_step_of_every_attempt_is_ignored():
    corrector = ModuleCorrector({"llm": "t"})
    for attempt, step in ((0, 0), (1, 5)):
        corrector.observe([observation(step, "llm", 0.1, [0.5] * 4, attempt)])
    assert corrector.corrections("run", 10, 0.0) == []
    corrector.observe([observation(6, "llm", 0.1, [0.5] * 4, attempt=1)])
    assert len(corrector.corrections("run", 10, 0.0)) == 1


def test_wild_ratios_are_clipped():
    corrector = ModuleCorrector({"llm": "t"})
    for step in range(60):
        corrector.observe([observation(step, "llm", 0.001, [1.0] * 3)])
    assert corrector.corrections("run", 60, 0.0)[0].factor <= 4.0


def test_predictions_include_the_factor_they_resumed_with():
    corrector = ModuleCorrector({"llm": "t"}, {"llm": 1.5})
    assert run(corrector, range(20), {"llm": 1.5}) == []
    assert corrector.factors == {"llm": 1.5}


def test_empty_microbatches_and_other_modules_teach_nothing():
    corrector = ModuleCorrector({"llm": "t"})
    for step in range(5):
        corrector.observe([observation(step, "llm", 0.0, [0.0] * 4), observation(step, "audio", 0.1, [0.5] * 4)])
    assert corrector.corrections("run", 5, 0.0) == []
