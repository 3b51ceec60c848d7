"""What modules took together on one stage, told apart: right where the mix tells, cautious where it does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflop.correct.attribute import StageTime, module_factors
from dflop.correct.estimate import ModuleCorrector
from tests.correct.test_estimate import observation

TRUTH = {"vision": 1.6, "llm": 0.9}
NO_GUESS = {"vision": 1.0, "llm": 1.0}


def stage_times(num: int, *, noise_frac: float = 0.0, seed: int = 0, mix: tuple[float, float] = (0.1, 0.9)):
    """Microbatches of equal predicted seconds, of which vision has a random share, as balanced ones are."""
    rng = np.random.default_rng(seed)
    for share in rng.uniform(*mix, num).tolist():
        expected_s = {"vision": 0.1 * share, "llm": 0.1 * (1 - share)}
        measured_s = sum(TRUTH[m] * s for m, s in expected_s.items()) * rng.normal(1.0, noise_frac)
        yield StageTime(measured_s, expected_s)


def test_the_mix_of_microbatches_tells_modules_apart():
    assert module_factors(list(stage_times(40)), NO_GUESS) == pytest.approx(TRUTH, rel=0.01)
    errors = [
        abs(found[m] / TRUTH[m] - 1)
        for seed in range(50)
        for found in [module_factors(list(stage_times(8, noise_frac=0.05, seed=seed)), NO_GUESS)]
        for m in TRUTH
    ]
    assert np.median(errors) < 0.05
    assert max(errors) < 0.3


def test_a_right_guess_is_kept():
    assert module_factors(list(stage_times(4)), TRUTH) == pytest.approx(TRUTH)


def test_where_all_microbatches_are_alike_the_common_error_is_shared():
    found = module_factors([StageTime(0.2, {"vision": 0.05, "llm": 0.05})] * 20, NO_GUESS)
    assert found["vision"] == pytest.approx(found["llm"]) == pytest.approx(2.0, rel=0.02)


def test_one_straggler_hardly_counts():
    times = list(stage_times(12))
    times[3] = dataclasses.replace(times[3], measured_s=20 * times[3].measured_s)
    assert module_factors(times, NO_GUESS) == pytest.approx(TRUTH, rel=0.08)


def test_stages_of_one_module_help():
    times = [*stage_times(4, mix=(0.5, 0.5)), *[StageTime(0.09, {"llm": 0.1})] * 4]
    assert module_factors(times, NO_GUESS) == pytest.approx(TRUTH, rel=0.03)


def test_a_module_that_had_no_work_keeps_its_factor():
    found = module_factors([StageTime(0.2, {"llm": 0.1})], {"audio": 1.3, "llm": 1.0})
    assert found["audio"] == pytest.approx(1.3)


def corrected(truth, *, steps: int = 30, lag: int = 2, known: bool = True) -> tuple[ModuleCorrector, int]:
    """A corrector that has seen steps of stages with both modules, and the number of corrections it made."""
    corrector, rng = ModuleCorrector({"vision": "t1", "llm": "t2"}), np.random.default_rng(0)
    in_force, pending, num_made = dict(corrector.factors), [], 0
    for step in range(steps):
        in_force |= {c.module: c.factor for c in pending if c.effective_step == step}
        shares, spans = {}, []
        for k in range(8):
            share = float(rng.uniform(0.1, 0.9))
            uncorrected = {"vision": 0.1 * share, "llm": 0.1 * (1 - share)}
            shares["llm", 0, 0, k] = {m: s * in_force[m] for m, s in uncorrected.items()}
            predicted_s = sum(shares["llm", 0, 0, k].values())
            measured_s = sum(truth[m] * s for m, s in uncorrected.items()) * float(rng.normal(1.0, 0.03))
            spans += [dataclasses.replace(observation(step, "llm", predicted_s, [measured_s]).spans[0], microbatch=k)]
        seen = dataclasses.replace(observation(step, "llm", 0.1, []), spans=tuple(spans))
        corrector.observe([seen], shares if known else {})
        made = corrector.corrections("run", step + lag, now_s=float(step))
        pending, num_made = pending + made, num_made + len(made)
    return corrector, num_made


def test_a_corrector_learns_every_module_of_a_mixed_stage():
    corrector, num_made = corrected(TRUTH)
    assert corrector.factors == pytest.approx(TRUTH, rel=0.05)
    assert num_made < 20


def test_a_corrector_leaves_a_right_prediction_alone():
    assert corrected(NO_GUESS)[1] == 0


def test_nothing_is_learnt_where_nobody_knows_the_modules_shares():
    corrector, num_made = corrected(TRUTH, known=False)
    assert (corrector.factors, num_made) == (NO_GUESS, 0)
