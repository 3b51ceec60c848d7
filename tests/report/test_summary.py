import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dflop.records import SourceLoss, StepObservation
from dflop.report.observed_steps import MeasuredStep
from dflop.report.run_plots import loss_curve
from dflop.report.run_tables import correction_table, key_numbers
from dflop.report.summary import RunSummary
from tests.builders import make_cluster, make_corrections, make_plan
from tests.report.runs import CUDA, make_run, make_span, observe

PLAN = make_plan({"vision": 2, "llm": 1})


def summary_of(train: Sequence[StepObservation] = (), **parts: Any) -> RunSummary:
    return RunSummary(**{"run": make_run(), "cluster": make_cluster(), "plan": PLAN, "train": train, **parts})


def test_training_numbers() -> None:
    losses = [6.0, 5.0, 4.0, 9.0, 3.0, 2.0, 1.0]
    train = [observe(t, loss=loss, step_s=1.0 + t, busy_s=0.5) for t, loss in enumerate(losses)]
    found = summary_of(train)
    assert found.ends_of_loss == (5.0, 2.0)
    assert found.step_s == 4.0
    assert found.median(lambda s: s.data_wait_s) == 0.01
    assert found.idle_frac == pytest.approx(sum(1 - 0.5 / (1 + t) for t in range(7)) / 7)


def test_speedups_seen_when_planning() -> None:
    plan = replace(PLAN, predicted_step_s=2.0, baseline_step_s=3.0, uniform_step_s=5.0)
    found = summary_of(plan=plan)
    assert (plan.planned_speedup, plan.planned_speedup_over_uniform) == (1.5, 2.5)
    assert ("speedup, planned", "1.50x", "simulated; over a uniform plan 2.50x") in key_numbers(found)
    lonely = replace(found, plan=replace(plan, uniform_step_s=math.nan))
    assert ("speedup, planned", "1.50x", "simulated; over a uniform plan -") in key_numbers(lonely)


def test_a_run_without_any_step() -> None:
    found = summary_of(run=make_run("failed"))
    assert found.steps == found.stages == ()
    assert found.corrections == []
    assert found.comparison is found.ends_of_loss is None
    assert all(
        math.isnan(v) for v in (found.step_s, found.idle_frac, found.mfu, found.median(lambda s: s.llm_tokens_per_s))
    )
    assert found.verdict.startswith("Not compared")


@pytest.mark.parametrize("lost", [0.0, math.nan])
@pytest.mark.parametrize(
    ("has_loss", "first", "last", "said"),
    [("yynyyy", 7 / 3, 5.0, "2.33 to 5.00"), ("nnyyyn", 4.0, 4.0, "4.00 to 4.00"), ("nn", math.nan, math.nan, "-")],
)
def test_a_step_whose_samples_were_all_lost_is_in_no_mean_and_no_plot(lost, has_loss, first, last, said) -> None:
    steps = [
        observe(t, loss=t + 1.0) if has == "y" else observe(t, loss=lost, num_supervised_tokens=0)
        for t, has in enumerate(has_loss)
    ]
    found = summary_of(steps)
    assert [s.loss is None for s in found.steps] == [has == "n" for has in has_loss]
    assert found.ends_of_loss == (None if said == "-" else pytest.approx((first, last)))
    assert next(value for label, value, _ in key_numbers(found) if label == "loss") == said
    curve = loss_curve([MeasuredStep(k + s.step, s.policy, s.ranks) for k in range(0, 60, 6) for s in found.steps])
    ET.fromstring(curve)
    assert " nan" not in curve.lower()


def test_validation_loss_is_over_tokens_of_all_sources_and_of_the_last_attempt() -> None:
    def loss(step: int, attempt: int, source: str, value: float, num_tokens: int = 10) -> SourceLoss:
        return SourceLoss("run", attempt, step, "validation", source, value, num_tokens, 1, 1e9)

    rows = [
        loss(9, 0, "a", 4.0),
        loss(9, 0, "b", 1.0, 20),
        loss(19, 1, "a", 1.5),
        loss(19, 0, "a", 9.0),
        loss(29, 1, "a", 3.0),
    ]
    found = summary_of(losses=rows)
    assert found.validation == {9: 2.0, 19: 1.5, 29: 3.0}
    assert ("validation loss", "3.0000", "after step 29; lowest 1.5000 after 19") in key_numbers(found)
    assert "validation loss" not in [label for label, *_ in key_numbers(summary_of())]


def test_the_load_balancing_loss_is_that_of_the_first_and_the_last_step() -> None:
    rows = [SourceLoss("run", 0, step, "routers", "llm", 2.0 - step / 10, 10, 1, 1e9) for step in range(5)]
    numbers = key_numbers(summary_of(losses=rows))
    said = "after step 4; 2.0000 after 0; 1: experts are used evenly"
    assert ("load balancing loss", "1.6000", said) in numbers
    assert "validation loss" not in [label for label, *_ in numbers]


def test_a_diverged_loss_is_not_hidden() -> None:
    train = [observe(t, loss=5.0 if t < 4 else math.nan) for t in range(6)]
    found = summary_of(train)
    assert found.ends_of_loss == pytest.approx((5.0, math.nan), nan_ok=True)
    ET.fromstring(loss_curve(found.steps))


def test_the_last_set_of_corrections_is_kept_whole() -> None:
    old = make_corrections("llm", [1.0, 1.5, 2.0], [100, 900], effective_step=2)
    new = make_corrections("llm", [1.1, 1.7], [500], effective_step=5)
    other = make_corrections("vision", [1.2], effective_step=3)
    rows = [*new[::-1], *old, *other]
    found = summary_of(correction_rows=rows)
    assert found.corrections == [list(other), list(new)]
    assert len(found.correction_sets) == 3


def test_devices_share_no_cores() -> None:
    assert summary_of(cluster=CUDA).num_cores is None
    assert summary_of(cluster=make_cluster(num_cores=2)).num_cores == 2


@pytest.mark.parametrize(
    ("cluster", "compute_s", "share"),
    [(make_cluster(num_cores=4), 0.2, "40.0 %"), (make_cluster(num_cores=1), 0.2, ""), (CUDA, 0.5, "")],
    ids=["others use the cores", "ranks share them", "devices"],
)
def test_a_run_slower_than_predicted_beside_other_programs_says_so(cluster, compute_s, share) -> None:
    """Its compute is predicted exactly; its steps by the clock take 2.5 times as long."""
    span = replace(make_span(0, 0.2, 0.3), forward_compute_s=compute_s / 2, backward_compute_s=compute_s / 2)
    found = summary_of([observe(0, spans=[span], busy_s=0.5, predicted_step_s=0.4)], cluster=cluster)
    numbers = {name: value for name, value, _ in key_numbers(found)}
    assert numbers["training step, predicted / measured"] == "0.40x"
    assert numbers.get("processor time / wall time", "") == share
    assert ("Other programs used the cores: forward and backward took 2.50 times" in found.verdict) == bool(share)


def test_corrections_say_from_which_step_how_sure_and_whether_they_work() -> None:
    learnt = make_corrections("llm", [1.0, 1.45, 1.1], [100, 900], effective_step=1, sd_frac=0.4, is_in_force=False)
    later = make_corrections("vision", [1.2, 2.0], [100], effective_step=2, level=1.1)
    steps = [observe(step, spans=[make_span(0, 0.2, 0.3, predicted=0.95)]) for step in range(2)]
    table = correction_table(summary_of(steps, correction_rows=[*learnt, *later]))
    assert table.rows == (
        ("llm", "overall", "1", "1.18x", "", "0 of 3 buckets", "8"),
        ("llm", "100 to 899", "", "1.45x", "40.0 %", "no, within noise", ""),
        ("vision", "overall", "next run", "1.10x", "", "2 of 2 buckets", "8"),
        ("vision", "0 to 99", "", "1.20x", "2.0 %", "yes", ""),
        ("vision", "from 100", "", "2.00x", "2.0 %", "yes", ""),
    )
    assert table.note.startswith("Median error of predicted compute: as planned 5.0 %, without corrections llm 10.0 %")
