"""Slow ranks: the judge makes them slow, and every way of packing gives them less."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.records import LLM
from dflop.schedule.assignment import assignment_of
from dflop.schedule.data_parallel import balance_ranks
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import module_items
from dflop.schedule.pack import token_cap
from dflop.schedule.policies import Effort, StepJob
from dflop.schedule.step_scheduler import predicted_spans, schedule_step
from dflop.simulate.step import step_nodes
from tests.builders import make_cost, make_plan, random_batch
from tests.schedule.steps import module_spans, plans_with_batches, stage_durations, step_seconds
from tests.schedule.test_data_parallel import SYNCS, step_s
from tests.simulate.graph import simulate, step_graph

EFFORT = Effort(num_profiles=3, num_ops=200_000, max_simulations=200)
PACES = st.sampled_from([1.0, 1.0, 0.8, 1.1, 2.0])


@st.composite
def cases(draw: st.DrawFn):
    """(plan, batch, cost, slowness of some nodes)."""
    plan, batch = draw(plans_with_batches())
    slowness = {node: draw(PACES) for node in step_nodes(plan) if draw(st.booleans())}
    return plan, batch, make_cost(*(m.module for m in plan.encoders)), slowness


def schedule(plan, batch, cost, slowness=None, **kwargs):
    kwargs.setdefault("effort", EFFORT)
    return schedule_step(run_id="run", step=0, plan=plan, batch=batch, cost=cost, slowness=slowness, **kwargs)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_judge_is_the_simulator_with_longer_durations(case):
    plan, batch, cost, slowness = case
    step_plan = schedule(plan, batch, cost, slowness)
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    owners = {w.module: w.owner for w in step_plan.work}
    durations = {}
    for (module, stage, rank), found in stage_durations(plan, items, owners, cost).items():
        times = slowness.get((LLM if len(plan.grids) == 1 else module, stage, rank), 1.0)
        durations[module, stage, rank] = [(times * f, times * b) for f, b in found]
    wanted = simulate(step_graph(plan, step_plan.work, durations)).makespan_s
    assert step_plan.predicted_step_s == pytest.approx(wanted)
    assert step_seconds(plan, step_plan, batch, cost, slowness) == pytest.approx(wanted)
    spans = predicted_spans(plan, step_plan, batch, cost, slowness)
    work = StepEvaluator(plan, items, cost, slowness=slowness).work(assignment_of(plan, step_plan))
    for row, node in zip((work.forward_s + work.backward_s).tolist(), step_nodes(plan), strict=True):
        assert row == pytest.approx([s.forward_s + s.backward_s for s in spans[node]])


@settings(max_examples=30, deadline=None)
@given(cases())
def test_never_worse_than_arrival_or_than_not_knowing(case):
    plan, batch, cost, slowness = case
    job = StepJob(plan, batch, cost, slowness=slowness)
    found, quick = schedule(plan, batch, cost, slowness), schedule(plan, batch, cost, slowness, policy="quick")
    assert found == schedule(plan, batch, cost, slowness)
    assert job.keeps_caps(assignment_of(plan, found))
    for rival in ("arrival", "length_grouped", "token_lpt", "bottleneck"):
        assignment = job.assign(rival, EFFORT)
        if job.keeps_caps(assignment):
            assert found.predicted_step_s <= job.judge.step_s(assignment)
    if job.keeps_caps(job.assign("arrival", EFFORT)):
        assert quick.predicted_step_s <= quick.arrival_step_s


@settings(max_examples=12, deadline=None)
@given(cases())
def test_ranks_that_are_as_fast_as_predicted_change_nothing(case):
    plan, batch, cost, _ = case
    ones = dict.fromkeys(step_nodes(plan), 1.0)
    elsewhere = {(LLM, 99, 99): 3.0}
    plain = schedule(plan, batch, cost)
    assert schedule(plan, batch, cost, ones) == schedule(plan, batch, cost, elsewhere) == plain


def work_of_ranks(plan, step_plan, batch, cost, module):
    """`[dp]` uncorrected seconds of work of each rank on the module's last stage."""
    spans = module_spans(plan, step_plan, batch, cost)
    m = plan.module(module)
    stage = m.parallel.pp - 1
    return np.array(
        [sum(s.forward_s + s.backward_s for s in spans[module, stage, rank]) for rank in range(m.parallel.dp)]
    )


@pytest.mark.parametrize("policy", ["balanced", "quick"])
@pytest.mark.parametrize(("pp", "slots"), [(1, 1), (1, 4), (2, 6), (4, 8)])
def test_a_replica_half_as_fast_gets_about_half_as_much(pp, slots, policy):
    plan = make_plan({LLM: 2}, llm_pp=pp, num_microbatches=slots)
    batch, cost = random_batch(96, encoders=(), seed=3), make_cost()
    slowness = {(LLM, stage, 1): 2.0 for stage in range(pp)}
    effort = Effort(num_ops=2_000_000, max_simulations=4_000)
    aware, blind = (schedule(plan, batch, cost, s, policy=policy, effort=effort) for s in (slowness, None))
    work = work_of_ranks(plan, aware, batch, cost, LLM)
    assert 0.25 <= work[1] / work.sum() <= 0.45
    gain = step_seconds(plan, aware, batch, cost, slowness) / step_seconds(plan, blind, batch, cost, slowness)
    assert gain < 0.9


@pytest.mark.parametrize("policy", ["balanced", "quick"])
@pytest.mark.parametrize("encoder_pp", [1, 2])
def test_an_encoder_rank_half_as_fast_gets_about_half_as_much(encoder_pp, policy):
    plan = make_plan({"vision": 2, LLM: 1}, encoder_pp=encoder_pp, num_microbatches=4)
    batch = random_batch(128, encoders=("vision",), seed=3)
    cost = make_cost("vision", scale={"vision": 4.0})
    slowness = {("vision", 0, 1): 2.0}
    aware, blind = (schedule(plan, batch, cost, s, policy=policy) for s in (slowness, None))
    work = work_of_ranks(plan, aware, batch, cost, "vision")
    assert 0.25 <= work[1] / work.sum() <= 0.45
    gain = step_seconds(plan, aware, batch, cost, slowness) / step_seconds(plan, blind, batch, cost, slowness)
    assert gain < 0.98


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=2, max_size=5),
    st.lists(st.sampled_from([1.0, 0.5, 1.5, 2.0]), min_size=1, max_size=2),
    st.integers(1, 2), st.sampled_from([0.0, 1.0]), st.sampled_from(SYNCS), st.integers(8, 20),
)  # fmt: skip
def test_the_lower_bound_holds_for_every_assignment_there_is(samples, slowness, num_slots, fixed_s, sync, cap):
    tokens, s, slow = np.array([t for t, _ in samples]), np.array([float(w) for _, w in samples]), np.array(slowness)
    num_buckets = len(slow) * num_slots
    if (cap := max(cap, token_cap(tokens, num_buckets))) and len(s) < num_buckets:
        return
    given = {"cap_tokens": cap, "num_microbatches": num_slots, "fixed_s": fixed_s, "sync": sync, "slowness": slow}
    found = balance_ranks(s, tokens, len(slow), **given)
    best = min(
        step_s(s, np.array(b), len(slow), num_slots, fixed_s, sync, slow)
        for b in itertools.product(range(num_buckets), repeat=len(s))
        if len(set(b)) == num_buckets and np.bincount(b, tokens).max() <= cap
    )
    told = step_s(s, found.slot * len(slow) + found.rank, len(slow), num_slots, fixed_s, sync, slow)
    assert found.step_s == pytest.approx(told)
    assert found.lower_bound_s <= best + 1e-9
    assert best <= found.step_s + 1e-9


@pytest.mark.parametrize("wrong", [np.ones(3), np.array([1.0, 0.0]), np.array([1.0, np.inf])])
def test_slowness_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="slowness"):
        balance_ranks(np.ones(4), np.ones(4, dtype=np.int64), 2, cap_tokens=10, slowness=wrong)
