"""Forward passes alone: the loss of every sample equals a plain loop over the batch, whatever the layout.

That they leave no gradient, and see the weights that steps before them updated, is asserted in every layout of
`parity.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dflop.records import LLM
from dflop.train.checkpoint import Checkpointer
from dflop.train.loop import Hooks
from dflop.train.manifest import BEST, read_latest
from dflop.train.plan_source import PlanMessage
from dflop.train.validation import Validation
from tests.train.layouts import IMAGES, LAYOUTS, MEDIA, MIXED, ONE, OTHERS, Layout
from tests.train.parity import TOLERANCE, Omni, Trial, exact_on
from tests.train.rank import Rank, loop_settings
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_inline_plan, make_step_plan

EVALUATED = {
    "inline dp2": Layout(ONE, dp=2),
    "vision + llm pp2, bad samples": Layout({"vision": (1, 1), LLM: (2, 1)}, bad=(1, 4)),
    "inline pp2, mixed stage, frozen": Layout(MIXED, frozen=("vision.tower", "audio.tower", LLM)),
    "inline tp2 dp2, sharded": LAYOUTS["inline tp2 dp2, sharded"],
    "inline dp4, sharded in twos": LAYOUTS["inline dp4, sharded in twos"],
    "inline cp3": OTHERS["inline cp3"],
}
IN_LANE = ("inline pp2, mixed stage, frozen", "inline dp4, sharded in twos", "inline dp2")


def losses_of_samples(rank, folder, trial):
    """By position, summed over ranks: of forward passes alone, and of the step after them."""
    exact_on("cpu")
    subject = trial.subject
    it = Rank(rank, trial.plan, subject.family, subject.build(), frozen=trial.frozen)
    batch, found = subject.batches[0], []
    for is_training in (False, True):
        trace = it.step(subject.source(batch), batch, trial.step_plans[0], trial.bad_positions, is_training)
        assert all(stage.training for stage in it.stages)
        of_rank = trace.sample_losses
        found.append(np.pad(of_rank, (0, len(batch) - len(of_rank))))
    summed = torch.from_numpy(np.stack(found))
    dist.all_reduce(summed)
    return summed.numpy()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.lane("layouts")] if n in IN_LANE else []) for n in EVALUATED]
)
def test_every_samples_loss_equals_a_plain_loop(name, tmp_path):
    layout = EVALUATED[name]
    subject, plain = layout.subject, layout.subject.plain()
    with torch.no_grad():
        expected = [
            0.0 if position in layout.bad else float(subject.loss_sum(plain, subject.batches[0], position))
            for position in range(subject.batch_size)
        ]
    for alone, trained in run_ranks(losses_of_samples, layout.plan.num_processes, tmp_path, layout.trial):
        assert alone == pytest.approx(expected, rel=TOLERANCE)
        assert trained == pytest.approx(expected, rel=TOLERANCE)


class Batches:
    """The plan of step t is of batch t."""

    def __init__(self, trial):
        self._step_plans = trial.step_plans

    def get(self, step):
        return PlanMessage(self._step_plans[step])


def validated_losses(rank, folder, trial):
    """(step, loss of every sample of two batches) after every second of three steps, as a trainer validates.

    And (step, losses of its samples) of the steps.
    """
    exact_on("cpu")
    subject, seen, trained, bad = trial.subject, [], [], []
    it = Rank(rank, trial.plan, subject.family, subject.build(), rate=0.0)
    hooks = Hooks(
        lambda _: None, lambda step, *_: bad.append(step),
        on_totals=lambda step, _plan, losses, _norms: trained.append((step, losses)),
        on_validation=lambda step, losses, elapsed_s: seen.append((step, losses)),
    )  # fmt: skip
    source = SyntheticSource([s for batch in subject.batches for s in batch])
    held_out = [replace(p, step=-1 - k) for k, p in enumerate(trial.step_plans[:2])]
    settings = loop_settings("run", 3, 1e-9)
    it.trainer(settings, source, Batches(trial), hooks, validation=Validation(held_out, 2)).run()
    assert not bad
    return seen, trained


def test_a_trainer_validates_every_so_many_steps_and_after_the_last(tmp_path):
    subject = Omni(MEDIA, num_steps=3)
    plan = make_inline_plan(ONE, dp=2, num_microbatches=2)
    trial = Trial(subject, plan, tuple(make_step_plan(plan, batch, step) for step, batch in enumerate(subject.batches)))
    plain = subject.plain()
    with torch.no_grad():
        expected = {
            shape.sample_index: float(subject.loss_sum(plain, batch, position))
            for batch in subject.batches for position, shape in enumerate(batch)
        }  # fmt: skip
    (one, trained), other = run_ranks(validated_losses, 2, tmp_path, trial)
    assert (one, trained) == other
    for step, losses in trained:
        wanted = {s.sample_index: expected[s.sample_index] for s in subject.batches[step]}
        assert losses == pytest.approx(wanted, rel=TOLERANCE)
    expected = {s.sample_index: expected[s.sample_index] for batch in subject.batches[:2] for s in batch}
    assert [step for step, _ in one] == [1, 2]
    for _, losses in one:
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_training_ends_where_the_loss_gets_no_lower_and_the_best_checkpoint_stays(one_rank, tmp_path):
    """Weights that never change have one loss: the first validation is the best one."""
    subject = Omni(IMAGES, num_steps=9)
    plan = make_inline_plan(({"vision": 2, LLM: 4},), dp=1, num_microbatches=2)
    step_plans = [make_step_plan(plan, batch, step) for step, batch in enumerate(subject.batches)]
    trial, events, saved = Trial(subject, plan, tuple(step_plans)), [], []

    def trainer(num_steps, patience, first_step=0):
        it = Rank(0, plan, subject.family, subject.build(), rate=0.0)
        validation = Validation([replace(step_plans[0], step=-1)], 1, keeps_best=True, patience=patience)
        hooks = Hooks(
            lambda seen: saved.append(seen.step), lambda *_: None, on_event=lambda *event: events.append(event)
        )
        source = SyntheticSource([s for batch in subject.batches for s in batch])
        settings = loop_settings("run", num_steps, 1e-30, first_step=first_step, checkpoint_every=1)
        keeper = Checkpointer(tmp_path, it.stages, it.optimizer, it.groups, {}, keep=1)
        return it.trainer(settings, source, Batches(trial), hooks, checkpointer=keeper, validation=validation)

    trainer(2, patience=3).run()
    trainer(6, patience=3).run()
    assert saved == [0, 1, 2, 3], "steps 1, 2 and 3 were not better than step 0"
    (event,) = events
    assert event[:2] == (3, "stopped_early")
    assert re.fullmatch(r"no lower .* in 3 validations since step 0 \(\d\.\d{4}\); 2 steps are skipped", event[2])
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000001", "step-00000006"]
    assert read_latest(tmp_path)[BEST] == "step-00000001"
    assert trainer(6, patience=3).run() == 6, "nothing is left"
    trainer(9, patience=3, first_step=6).run()
    assert saved[4:] == [6, 7, 8], "a new stage has all patience again, and ends with its last step"


def test_a_loss_that_is_not_finite_is_never_the_best():
    validation = Validation((), 1, patience=2)
    assert [validation.judge(step, loss) for step, loss in enumerate((math.nan, 2.0, math.inf, math.nan))] == [
        False, True, False, False,
    ]  # fmt: skip
    assert (validation.best_loss, validation.best_step, validation.num_worse) == (2.0, 1, 2)
