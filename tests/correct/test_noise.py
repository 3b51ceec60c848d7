"""What microbatches of a rank share in a step is told from what stays."""

import math

import numpy as np
import pytest

from dflop.correct.noise import MAX_SD, SharedNoise

NODES = [("llm", 0, rank) for rank in range(4)]
OWN_SD, NUM_MICROBATCHES = 0.05, 16
OWN_VAR = 1.57 * OWN_SD**2 / NUM_MICROBATCHES


def seen(shared_sd, num_steps=200, slow=None, seed=0):
    """Noise learnt from ranks whose steps stray by `shared_sd`; from step 20 on, rank 3 is slower."""
    rng, found = np.random.default_rng(seed), SharedNoise()
    for step in range(num_steps):
        middles = {}
        for node in NODES:
            log = rng.normal(0.0, math.hypot(shared_sd, math.sqrt(OWN_VAR)))
            if slow and node[2] == 3 and step >= 20:
                log += math.log(slow)
            middles[node] = (log, OWN_VAR)
        found.observe(middles)
    return found


@pytest.mark.parametrize("shared_sd", [0.02, 0.05, 0.1])
def test_it_is_found(shared_sd):
    assert math.sqrt(seen(shared_sd).var) == pytest.approx(shared_sd, rel=0.35)
    assert math.sqrt(seen(0.0).var) < 0.01, "where there is none little is seen"


def test_a_rank_that_stays_slow_is_no_noise():
    quiet, slow = seen(0.02, 60), seen(0.02, 60, slow=1.6)
    assert math.sqrt(slow.var) < 1.5 * math.sqrt(quiet.var)


def test_one_wild_step_is_bounded():
    found = seen(0.02)
    before = found.var
    found.observe({node: (5.0, OWN_VAR) for node in NODES})
    assert found.var < 2 * before
    for sign in (1, -1) * 200:
        found.observe({node: (5.0 * sign, OWN_VAR) for node in NODES})
    assert found.var <= MAX_SD**2
