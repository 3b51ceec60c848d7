from __future__ import annotations

import math

import pytest

from dflop.errors import TrainError
from dflop.views.overfit import verdict
from tests.report.runs import observe
from tests.report.test_summary import summary_of


def losses(*values):
    return summary_of([observe(step, loss=loss) for step, loss in enumerate(values)])


def test_a_loss_that_falls_is_told():
    found = verdict(losses(4.0, 4.0, 4.0, 3.0, 2.0, 1.0), 8, "run.yaml")
    assert found == "overfit: loss 4.0000 to 2.0000 in 6 steps on 8 samples, it falls"


@pytest.mark.parametrize("values", [(4.0,) * 6, (4.0, 4.0, 4.0, 4.0, 5.0, 4.0), (4.0, 3.0, 2.0, math.nan), ()])
def test_one_that_does_not_is_an_error(values):
    with pytest.raises(TrainError, match="on 8 samples, it does not fall") as caught:
        verdict(losses(*values), 8, "run.yaml")
    assert (caught.value.where, caught.value.exit_code) == ("run.yaml", 1)
