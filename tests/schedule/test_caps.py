import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.records import LLM
from dflop.schedule.assignment import Assignment
from dflop.schedule.caps import exceeded, fullest, keeps, plan_caps
from dflop.schedule.items import module_items
from dflop.schedule.pack import token_cap, token_lpt
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.step_scheduler import schedule_step
from tests.builders import make_cost, make_inline_plan, make_plan, make_sample, random_batch


def with_caps(plan, max_tokens):
    modules = tuple(dataclasses.replace(m, max_tokens=max_tokens.get(m.module, 0)) for m in plan.modules)
    return dataclasses.replace(plan, modules=modules)


@st.composite
def cases(draw: st.DrawFn):
    """(plan, batch): either layout, memory that binds the LLM, the encoder, both or neither."""
    num_slots = draw(st.integers(1, 5))
    if draw(st.booleans()):
        dp = {"vision": draw(st.integers(1, 3)), LLM: draw(st.integers(1, 2))}
        plan = make_plan(dp, llm_pp=draw(st.integers(1, 3)), num_microbatches=num_slots)
    else:
        plan = make_inline_plan(draw(st.integers(1, 2)), pp=draw(st.integers(1, 3)), num_microbatches=num_slots)
    batch = random_batch(draw(st.integers(1, 24)), encoders=("vision",), seed=draw(st.integers(0, 1000)))
    share = draw(st.sampled_from([0.5, 1.0, 1.1, 2.0]))
    caps = {}
    for m in plan.modules:
        total = int(module_items(batch, m.module).num_tokens.sum())
        if draw(st.booleans()):
            caps[m.module] = 1 + int(share * total / (num_slots * m.parallel.dp))
    return with_caps(plan, caps), batch


def keeps_slowly(plan, job, assignment):
    """The promise in words: no microbatch, no window, no encoder rank over what memory holds or the batch needs."""
    owners, llm = assignment.owners(plan, job.items), plan.module(LLM)
    tokens = job.items[LLM].num_tokens
    num_buckets = plan.num_microbatches * llm.parallel.dp
    packable = token_cap(tokens, num_buckets)
    lpt = int(np.bincount(token_lpt(tokens, num_buckets), tokens).max(initial=0))
    per_slot = packable if not llm.max_tokens else max(llm.max_tokens, min(packable, lpt))
    for rank in range(llm.parallel.dp):
        sums = [sum(int(tokens[i]) for i in slot[rank]) for slot in owners[LLM]]
        window = min(len(sums), llm.parallel.pp)
        if max(sums) > max(llm.max_tokens, packable):
            return False
        if any(sum(sums[k : k + window]) > window * per_slot for k in range(len(sums) - window + 1)):
            return False
    for encoder in plan.encoders:
        items = job.items[encoder.module]
        whole = [
            int(items.num_tokens[[j for j, s in enumerate(items.sample) if s == i]].sum()) for i in range(len(tokens))
        ]
        largest = max(whole if len(plan.grids) == 1 else items.num_tokens.tolist(), default=0)
        for slot in owners[encoder.module]:
            for ids in slot:
                if encoder.max_tokens and items.num_tokens[list(ids)].sum() > max(encoder.max_tokens, largest):
                    return False
    return True


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 1000))
def test_any_assignment_is_judged_by_what_memory_holds(case, seed):
    plan, batch = case
    job, rng = StepJob(plan, batch, make_cost("vision")), np.random.default_rng(seed)
    llm, vision = plan.module(LLM), plan.module("vision")
    rank = rng.integers(llm.parallel.dp, size=len(batch))
    item_rank = rng.integers(vision.parallel.dp, size=len(job.items["vision"].sample))
    if len(plan.grids) == 1:
        item_rank = rank[job.items["vision"].sample_of]
    assignment = Assignment(rng.integers(plan.num_microbatches, size=len(batch)), rank, {"vision": item_rank})
    for found in (assignment, job.assign("token_lpt", Effort()), job.assign("bottleneck", Effort())):
        assert keeps(job.caps, plan, job.items, found) == keeps_slowly(plan, job, found)


def test_the_search_finds_what_encoder_memory_asks_for():
    """Four samples of 100 image tokens each and four without: two images in a slot are too many."""
    plan = with_caps(make_plan({"vision": 1, LLM: 1}, llm_pp=2, num_microbatches=4), {"vision": 100})
    batch = [make_sample(i, 10 if i < 4 else 35, [("vision", 100)] if i < 4 else []) for i in range(8)]
    job = StepJob(plan, batch, make_cost("vision", scale={"vision": 0.01}))
    found = job.best(Effort(max_simulations=2000))[1]
    assert sorted(found.slot[:4].tolist()) == [0, 1, 2, 3]
    assert job.keeps_caps(found)


def test_in_flight_cap_is_tighter_than_full_buckets_where_the_batch_is_longer_than_planned():
    plan = with_caps(make_plan({LLM: 1}, llm_pp=2, num_microbatches=4), {LLM: 100})
    items = {LLM: module_items([make_sample(i, 55) for i in range(8)], LLM)}
    caps = plan_caps(plan, items)
    assert (caps.bucket_tokens, caps.window, caps.in_flight_tokens) == (138, 2, 220)


def bound_plan(dp, *, inline=False, num_slots=6, batch, share):
    """A plan whose encoder holds `share` times an even part of the batch."""
    if inline:
        plan = make_inline_plan(dp[1], pp=2, num_microbatches=num_slots)
    else:
        plan = make_plan({"vision": dp[0], LLM: dp[1]}, num_microbatches=num_slots)
    total = int(module_items(batch, "vision").num_tokens.sum())
    return with_caps(plan, {"vision": int(share * total / (num_slots * plan.module("vision").parallel.dp))})


@pytest.mark.parametrize(
    ("dp", "options", "is_hard"),
    [((3, 4), {}, True), ((2, 1), {}, False), ((1, 2), {}, False), ((3, 3), {"inline": True}, False)],
)
def test_quick_plans_keep_the_memory_of_encoders_that_share_out_a_microbatch(dp, options, is_hard):
    """Texts beside clips: what is balanced in seconds puts the clips of similar size side by side."""
    rng, num_lost = np.random.default_rng(0), 0
    for _ in range(4):
        clips = [int(t) for t in rng.lognormal(5.5, 0.9, 240).clip(10, 1500)]
        batch = [
            make_sample(i, int(rng.integers(10, 900)), [("vision", t)] if i % 3 else []) for i, t in enumerate(clips)
        ]
        plan = bound_plan(dp, batch=batch, share=1.2, **options)
        job = StepJob(plan, batch, make_cost("vision", scale={"vision": 0.05}))
        num_lost += not (
            job.keeps_caps(job.assign("arrival", Effort())) or job.keeps_caps(job.assign("bottleneck", Effort()))
        )
        assert job.keeps_caps(job.assign("quick", Effort()))
    assert num_lost or not is_hard, "neither arrival order nor balanced seconds keep it"


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_quick_plan_exceeds_no_more_than_any_of_its_rivals(case):
    plan, batch = case
    job, effort = StepJob(plan, batch, make_cost("vision")), Effort()
    quick = fullest(job.caps, plan, job.items, job.assign("quick", effort)).frac
    rivals = [job.assign(policy, effort) for policy in ("arrival", "bottleneck")]
    assert max(quick, 1) <= max(1, min(fullest(job.caps, plan, job.items, a).frac for a in rivals))


def test_where_none_can_keep_the_memory_the_smallest_peak_runs_and_says_by_how_much():
    batch = [make_sample(i, 20, [("vision", 40 + i)]) for i in range(24)]
    plan = bound_plan((1, 2), batch=batch, share=0.8, num_slots=4)
    step = schedule_step(run_id="r", step=0, plan=plan, batch=batch, cost=make_cost("vision"), policy="quick")
    fill = exceeded(plan, batch, step)
    assert (fill.module, fill.cap_tokens) == ("vision", 247)
    assert 247 / 0.8 <= fill.num_tokens < 1.05 * 247 / 0.8
    assert str(fill) == f"{fill.num_tokens} tokens of `vision` in a microbatch where memory allows 247, 27% more"
    roomy = bound_plan((1, 2), batch=batch, share=1.3, num_slots=4)
    assert exceeded(roomy, batch, step) is None
