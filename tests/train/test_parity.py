"""Same mathematics: losses and every gradient equal a single-process Hugging Face run, whatever the layout.

Three steps of four microbatches whose shapes all differ. `test_the_steps_are_as_uneven_as_claimed` says what they meet:
microbatches and whole steps in which encoders, replicas of the LLM or all ranks have nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from dflop.records import LLM, Plan, StepPlan
from tests.train.parity import Omni, Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import make_inline_plan, make_plan, make_step_plan

NUM_MICROBATCHES = 4

IMAGES, MEDIA = ("image", "video"), ("image", "video", "audio")
LAYOUTS = {
    "vision + llm": ({"vision": (1, 1), LLM: (1, 1)}, IMAGES, False),
    "vision dp2 + llm pp2": ({"vision": (1, 2), LLM: (2, 1)}, IMAGES, False),
    "vision dp2 + llm dp2": ({"vision": (1, 2), LLM: (1, 2)}, IMAGES, False),
    "vision pp2 + llm dp2": ({"vision": (2, 1), LLM: (1, 2)}, IMAGES, False),
    "vision dp3 + llm": ({"vision": (1, 3), LLM: (1, 1)}, IMAGES, False),
    "vision + llm pp3": ({"vision": (1, 1), LLM: (3, 1)}, IMAGES, False),
    "vision dp2 + llm tp2": ({"vision": (1, 2), LLM: (1, 1, 2)}, IMAGES, False),
    "vision tp2 + llm dp2": ({"vision": (1, 1, 2), LLM: (1, 2)}, IMAGES, False),
    "vision tp2 + llm pp2": ({"vision": (1, 1, 2), LLM: (2, 1)}, IMAGES, False),
    "vision pp2 dp2 + llm pp2": ({"vision": (2, 2), LLM: (2, 1)}, IMAGES, False),
    "vision dp2 + llm dp2 tp2, tied": ({"vision": (1, 2), LLM: (1, 2, 2)}, IMAGES, True),
    "vision + audio + llm dp2": ({"vision": (1, 1), "audio": (1, 1), LLM: (1, 2)}, MEDIA, False),
    "vision + audio + llm pp2, tied": ({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, ("image", "audio"), True),
    "vision + audio pp2 + llm dp2": ({"vision": (1, 1), "audio": (2, 1), LLM: (1, 2)}, MEDIA, False),
    "inline dp2": (([{"vision": 2, "audio": 2, LLM: 4}], 2), MEDIA, False),
    "inline tp2": (([{"vision": 2, LLM: 4}], 1, 2), IMAGES, False),
    "inline pp2, mixed stage": (([{"vision": 2, "audio": 1}, {"audio": 1, LLM: 4}], 1), MEDIA, False),
    "inline pp3, rows pass through": (([{"vision": 2}, {"audio": 2}, {LLM: 4}], 1), MEDIA, False),
    "inline pp2 dp2, tied": (([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], 2), MEDIA, True),
    "inline pp2 dp2, mixed stages": (([{"vision": 2, "audio": 1}, {"audio": 1, LLM: 4}], 2), MEDIA, False),
}
"""(pp, dp[, tp]) of every module of a split plan, or (layers per stage, dp[, tp]) of an inline one; media; if tied."""


def trial_of(name: str) -> Trial:
    layout, kinds, tied = LAYOUTS[name]
    plan = plan_of(layout)
    # As many as tensor-parallel ranks of the LLM can share.
    subject = Omni(kinds, tied, kv_heads=plan.module(LLM).parallel.tp)
    return Trial(subject, plan, step_plans(plan, subject))


def plan_of(layout) -> Plan:
    if isinstance(layout, dict):
        return make_plan(layout, num_microbatches=NUM_MICROBATCHES)
    stages, dp, *tp = layout
    return make_inline_plan(stages, dp=dp, tp=tp[0] if tp else 1, num_microbatches=NUM_MICROBATCHES)


def step_plans(plan: Plan, subject: Omni) -> tuple[StepPlan, ...]:
    return tuple(make_step_plan(plan, batch, step, idle=True) for step, batch in enumerate(subject.batches))


cached_reference = cache(reference)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_hugging_face(name, tmp_path):
    trial = trial_of(name)
    assert_equal_steps(run_trial(trial, tmp_path), cached_reference(trial.subject))


def test_bad_sample_changes_nobody_elses_gradient(tmp_path):
    plan, subject, bad = plan_of({"vision": (1, 1), LLM: (1, 1)}), Omni(IMAGES), (1, 4)
    trial = Trial(subject, plan, step_plans(plan, subject), bad_positions=bad)
    assert_equal_steps(run_trial(trial, tmp_path), reference(subject, bad_positions=bad))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_steps_are_as_uneven_as_claimed(name):
    trial = trial_of(name)
    for module in trial.plan.modules:
        met = {what for step_plan in trial.step_plans for what in unevenness(step_plan, module.module)}
        wanted = {"text only", "nobody"} if module.module != LLM else {"nobody"}
        if module.parallel.dp > 1:
            wanted |= {"all replicas", "one idles in a microbatch", "one idles in a whole step"}
        assert wanted <= met, module.module
    for step_plan, batch in zip(trial.step_plans, trial.subject.batches, strict=True):
        llm = step_plan.of(LLM)
        shapes = [tuple(sorted(llm.item_rows[i] for i in ids)) for slot in llm.owner for ids in slot if ids]
        assert len(set(shapes)) == len(shapes), "two microbatches of one shape"
        replicas = [[llm.item_sample[i] for ids in rank for i in ids] for rank in zip(*llm.owner, strict=True)]
        supervised = [sum(batch[position].num_supervised_tokens for position in rank) for rank in replicas]
        assert len(set(supervised)) == len(supervised), "replicas share the tokens of the loss evenly"


def unevenness(step_plan: StepPlan, module: str) -> Iterator[str]:
    """What a module meets in a step."""
    owner, llm_owner = step_plan.of(module).owner, step_plan.of(LLM).owner
    for slot, llm_slot in zip(owner, llm_owner, strict=True):
        if not any(slot):
            yield "text only" if any(llm_slot) else "nobody"
        elif not all(slot):
            yield "one idles in a microbatch"
    yield "all replicas" if all(any(rank) for rank in zip(*owner, strict=True)) else "one idles in a whole step"
