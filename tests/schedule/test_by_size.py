"""Corrections by size of item: what every microbatch is predicted to take, against a sum over its items by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.cost.model import has_edge
from dflop.records import LLM, ModuleFactors, RunMode
from dflop.schedule.assignment import assignment_of
from dflop.schedule.attribution import bucket_seconds
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import levelled, module_items
from dflop.schedule.policies import Effort
from dflop.schedule.step_scheduler import predicted_spans, schedule_step
from dflop.simulate.step import step_nodes
from tests.builders import make_cost, make_plan, make_sample, random_batch
from tests.schedule.steps import limited, module_spans, plans_with_batches, step_seconds, with_reruns

EFFORT = Effort(num_profiles=3, num_ops=30_000, max_simulations=60)
FACTORS = st.floats(0.25, 4.0)


@st.composite
def cases(draw: st.DrawFn):
    """(plan, batch, uncorrected cost, corrections by size of every module)."""
    plan, batch = draw(plans_with_batches())
    factors = {}
    for name in (m.module for m in plan.modules):
        edges = tuple(sorted(draw(st.sets(st.sampled_from([20, 80, 100, 150, 400]), max_size=3))))
        values = tuple(draw(st.lists(FACTORS, min_size=len(edges) + 1, max_size=len(edges) + 1)))
        factors[name] = ModuleFactors(name, draw(FACTORS) if edges else values[0], edges, values)
    return draw(limited(plan, batch)), batch, with_reruns(make_cost(*(m.module for m in plan.encoders))), factors


def schedule(plan, batch, cost, **kwargs):
    return schedule_step(run_id="run", step=0, plan=plan, batch=batch, cost=cost, effort=EFFORT, **kwargs)


def seconds_by_hand(plan, step_plan, batch, plain, factors):
    """Per (module, stage, rank, microbatch) the corrected seconds, one item after the other."""
    found = {}
    for m in plan.modules:
        items = module_items(batch, m.module)
        for stage, num_layers in enumerate(m.layers_per_stage):
            key = {"num_layers": num_layers, "edge": has_edge(m.layers_per_stage, stage)}
            for k, ranks in enumerate(step_plan.of(m.module).owner):
                for rank, ids in enumerate(ranks):
                    load = [sum(int(column[i]) for i in ids) for column in items.loads]
                    again = m.num_rerun(stage, load[1]) / max(num_layers, 1)
                    uncorrected = float(sum(plain.module_seconds(m.module, load, RunMode(recompute=again), **key)))
                    weighted = total = 0.0
                    for i in ids:
                        bucket = sum(edge <= items.num_tokens[i] for edge in factors[m.module].edges)
                        one = float(plain.item_seconds(m.module, tuple(c[i] for c in items.loads), **key))
                        weighted, total = weighted + factors[m.module].factors[bucket] * one, total + one
                    found[m.module, stage, rank, k] = uncorrected * weighted / total if total else 0.0
    return found


@settings(max_examples=25, deadline=None)
@given(cases())
def test_a_microbatch_takes_the_mean_factor_of_its_items(case):
    plan, batch, plain, factors = case
    cost = plain.with_corrections(factors)
    step_plan = schedule(plan, batch, cost)
    wanted = seconds_by_hand(plan, step_plan, batch, plain, factors)
    spans = module_spans(plan, step_plan, batch, cost)
    told = {(*node, s.microbatch): s.forward_s + s.backward_s for node, found in spans.items() for s in found}
    assert told == pytest.approx(wanted)
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    work = StepEvaluator(plan, items, cost).work(assignment_of(plan, step_plan))
    stages = predicted_spans(plan, step_plan, batch, cost)
    judged = (work.forward_s + work.backward_s).tolist()
    for row, node in zip(judged, step_nodes(plan), strict=True):
        span_s = [s.forward_s + s.backward_s for s in stages[node]]
        assert row == pytest.approx(span_s)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_buckets_hold_what_the_tables_predict_and_factors_make_the_correction_of_it(case):
    plan, batch, plain, factors = case
    cost = plain.with_corrections(factors)
    step_plan = schedule(plan, batch, cost)
    shares = bucket_seconds(plan, step_plan, batch, cost, {m: f.edges for m, f in factors.items()})
    for under, of_buckets in ((plain, None), (cost, factors)):
        spans = predicted_spans(plan, step_plan, batch, under)
        assert shares.nodes == step_nodes(plan)
        for node in shares.nodes:
            found = shares.of(node)
            told = [
                sum(float(s @ (of_buckets[m].factors if of_buckets else np.ones_like(s))) for m, s in modules.items())
                for modules in found
            ]
            assert told == pytest.approx([s.forward_s + s.backward_s for s in spans[node]])
            assert all((s >= 0).all() for modules in found for s in modules.values())


@settings(max_examples=15, deadline=None)
@given(cases())
def test_plans_are_no_worse_than_arrival_and_score_as_predicted(case):
    plan, batch, plain, factors = case
    cost = plain.with_corrections(factors)
    balanced = schedule(plan, batch, cost)
    assert step_seconds(plan, balanced, batch, cost) == balanced.predicted_step_s
    arrival = schedule(plan, batch, cost, policy="arrival")
    assert step_seconds(plan, arrival, batch, cost) == balanced.arrival_step_s
    quick = schedule(plan, batch, cost, policy="quick")
    assert quick == schedule(plan, batch, cost, policy="quick")


def test_what_takes_longer_than_predicted_is_spread_out():
    """Long samples that take three times as long: levels alone would put as much of them on one rank as on another."""
    plan, batch = make_plan({LLM: 4}, num_microbatches=2), random_batch(64, encoders=(), seed=5)
    plain = make_cost()
    cost = plain.with_corrections({LLM: ModuleFactors(LLM, 1.7, (200,), (1.0, 3.0))})
    level = plain.with_corrections({LLM: 1.7})
    aware_s, blind_s = (step_seconds(plan, schedule(plan, batch, c), batch, cost) for c in (cost, level))
    assert aware_s < 0.97 * blind_s


# Levels for aggregated loads

BY_SIZE = ModuleFactors(LLM, level=9.0, edges=(100, 200), factors=(1.0, 2.0, 4.0))


def test_the_level_is_the_mean_factor_weighted_by_seconds():
    cost = make_cost("vision").with_corrections({LLM: BY_SIZE, "vision": 1.5})
    batches = [[make_sample(0, 50), make_sample(1, 150)], [make_sample(2, 300)]]
    plain = cost.uncorrected()
    seconds = [float(plain.item_seconds(LLM, (10, n, n**2), num_layers=4, edge=True)) for n in (50, 150, 300)]
    expected = sum(f * s for f, s in zip((1.0, 2.0, 4.0), seconds, strict=True)) / sum(seconds)
    found = levelled(cost, batches)
    assert found.level(LLM) == pytest.approx(expected)
    assert found.item_factors(LLM, [50, 150, 300]).tolist() == [1.0, 2.0, 4.0]
    assert found.corrections["vision"] == 1.5
    assert cost.level(LLM) == 9.0
