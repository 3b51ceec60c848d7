import pytest

from dflop.plan.rank import scheduled_step_s
from dflop.plan.robust import FACTORS, encoder_regrets
from dflop.plan.search import plan_problem
from tests.plan.problems import make_problem


def test_a_plan_is_judged_under_slower_and_faster_encoders_beside_the_best_there():
    problem = make_problem("vision", num_processes=4)
    plan = plan_problem(problem)[0]
    told = []
    regrets = encoder_regrets(problem, plan, told.append)
    assert [r.factor for r in regrets] == list(FACTORS)
    steps = [r.step_s for r in regrets]
    assert steps[0] < scheduled_step_s(problem, plan) < steps[1]
    for regret in regrets:
        assert regret.frac == pytest.approx(max(0.0, regret.step_s / regret.best.predicted_step_s - 1))
    assert "2 times as long" in told[-1]


def test_a_language_model_alone_has_no_encoder_to_be_wrong_about():
    problem = make_problem(num_processes=2)
    assert encoder_regrets(problem, plan_problem(problem)[0], lambda line: None) == ()
