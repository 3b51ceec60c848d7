"""The step as the search sees it takes as long as the judge says, where seconds add up over samples."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.records import LLM
from dflop.schedule.anneal import score
from dflop.schedule.policies import StepJob
from dflop.simulate.step import step_nodes
from tests.builders import make_cost, make_inline_plan, random_batch
from tests.schedule.steps import limited, with_reruns


@st.composite
def jobs(draw: st.DrawFn) -> StepJob:
    """The LLM alone, some ranks slow, groups of ranks that meet or none."""
    dp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    plan = make_inline_plan(dp, pp=pp, modules=(LLM,), num_microbatches=draw(st.integers(1, 4)))
    llm = replace(plan.module(LLM), parameter_shards=draw(st.sampled_from([1, 2, dp])), max_tokens=10**6)
    plan = replace(plan, modules=(llm,))
    batch = random_batch(draw(st.integers(1, 16)), encoders=(), seed=draw(st.integers(0, 1000)))
    slowness = {step_nodes(plan)[-1]: draw(st.sampled_from([1.0, 1.5]))}
    return StepJob(draw(limited(plan, batch)), batch, with_reruns(make_cost()), slowness=slowness)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(0, 1000))
def test_the_search_sees_the_step_that_the_judge_does(job, seed):
    bucket = np.random.default_rng(seed).integers(job.num_buckets, size=len(job.items[LLM].sample))
    assert score(job.task, bucket) == pytest.approx(job.judge.step_s(job._in_buckets(bucket)), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(jobs())
def test_ranks_without_a_pipeline_are_balanced_by_the_seconds_of_the_judge(job):
    found = job._over_ranks(100_000) if job.plan.module(LLM).parallel.pp == 1 else None
    if found is not None:
        bucket = found.slot * job.num_ranks + found.rank
        assert score(job.task, bucket) == pytest.approx(job.judge.step_s(found), rel=1e-9)
