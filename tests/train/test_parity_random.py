"""Whatever the scheduler may decide, the gradients are those of plain Hugging Face: drawn assignments of few samples.

The layouts need two processes at most, so that drawing is affordable; `test_parity.py` has the others.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.records import LLM
from tests.train.parity import Omni, Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import assign, make_inline_plan, make_plan

IMAGES, MEDIA = ("image", "video"), ("image", "video", "audio")
PLANS = {
    "vision + llm": (lambda k: make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=k), IMAGES),
    "inline dp2": (lambda k: make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=2, num_microbatches=k), MEDIA),
    "inline pp2": (
        lambda k: make_inline_plan([{"vision": 2, "audio": 1, LLM: 0}, {"audio": 1, LLM: 4}], dp=1, num_microbatches=k),
        MEDIA,
    ),
    "one process": (lambda k: make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=k), MEDIA),
}  # fmt: skip
cached_reference = cache(reference)


@st.composite
def trials(draw):
    """Any number of microbatches, more than samples too; any sample in any of them, any order, any owner."""
    make, kinds = PLANS[draw(st.sampled_from(list(PLANS)))]
    subject = Omni(kinds, num_steps=2, batch_size=6, seed=draw(st.integers(0, 2)))
    plan = make(draw(st.integers(1, 8)))
    microbatch = st.integers(0, plan.num_microbatches - 1)
    plans = [
        assign(
            plan, batch, step,
            slots=draw(st.lists(microbatch, min_size=len(batch), max_size=len(batch))),
            replica=lambda dp: draw(st.integers(0, dp - 1)),
            shuffled=lambda count: draw(st.permutations(range(count))),
        )
        for step, batch in enumerate(subject.batches)
    ]  # fmt: skip
    return Trial(subject, plan, tuple(plans))


@pytest.mark.lane("layouts")
@settings(max_examples=12)
@given(trials())
def test_gradients_equal_hugging_face_however_samples_are_assigned(tmp_path_factory, trial):
    ranks = run_trial(trial, tmp_path_factory.mktemp("ranks"))
    assert_equal_steps(ranks, cached_reference(trial.subject))
