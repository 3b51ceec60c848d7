"""Same mathematics: losses and every gradient equal a single-process Hugging Face run, whatever the layout.

Steps of four microbatches whose shapes all differ; they meet microbatches and whole steps in which encoders, replicas
of the LLM or all ranks have nothing. `make test` runs what together takes every mechanism once; the other layouts are
in a lane.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.records import LLM
from tests.train import half
from tests.train.layouts import LAYOUTS, OTHERS, Layout
from tests.train.parity import Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import ALL, assign

cached_reference = cache(reference)


def in_lane(names):
    return [pytest.param(name, marks=pytest.mark.lane("layouts")) for name in names]


def assert_parity(layout: Layout, folder) -> None:
    expected = cached_reference(layout.subject, frozen=layout.frozen, bad_positions=layout.bad)
    assert_equal_steps(run_trial(layout.trial, folder), expected)


@pytest.mark.parametrize("name", [*LAYOUTS, *in_lane(OTHERS)])
def test_gradients_equal_hugging_face(name, tmp_path):
    assert_parity((LAYOUTS | OTHERS)[name], tmp_path)


def test_microbatches_differ_in_what_runs_again():
    """On every stage, and between replicas that share out parameters."""
    for layout in (of for of in (LAYOUTS | OTHERS).values() if of.limited):
        llm, works = layout.plan.module(LLM), [p.of(LLM) for p in layout.trial.step_plans]
        for stage, num_layers in enumerate(llm.layers_per_stage):
            found = [
                [llm.num_rerun(stage, sum(work.item_rows[i] for i in items)) for items in of_ranks]
                for work in works for of_ranks in work.owner
            ]  # fmt: skip
            assert {min(map(min, found)), max(map(max, found))} == {0, num_layers} if num_layers else True
            assert llm.parallel.dp == 1 or any(min(of) == 0 < max(of) for of in found)


def test_bad_sample_changes_nobody_elses_gradient(tmp_path):
    assert_parity(Layout({"vision": (1, 1), LLM: (1, 1)}, bad=(1, 4)), tmp_path)


@st.composite
def trials(draw) -> Trial:
    """Any number of microbatches, more than samples too; any sample in any of them, any order, owner and levers."""
    layout = (LAYOUTS | OTHERS)[
        draw(st.sampled_from(["vision + llm", "inline dp2", "inline cp3", "inline pp2, mixed stage"]))
    ]
    levers = {"half": draw(st.booleans()), "offloaded": draw(st.booleans()), "sharded": draw(st.sampled_from([0, ALL]))}
    layout = replace(layout, recompute=tuple(draw(st.sets(st.sampled_from(["vision", LLM])))), **levers)
    plan = replace(layout.plan, num_microbatches=draw(st.integers(1, 8)))
    subject = replace(layout.subject, batch_size=6, seed=draw(st.integers(0, 2)))
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


@pytest.mark.parametrize("name", ["vision + llm", "inline tp2", *in_lane(["inline pp2", "inline dp2", "inline cp2"])])
def test_bfloat16_is_as_exact_as_hugging_face(name, tmp_path):
    """The same on a GPU is `tests/gpu/test_engine_gpu.py`."""
    half.assert_as_exact_as_hugging_face(name, "cpu", tmp_path)
