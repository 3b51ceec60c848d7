from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.cost.model import CostModel
from dflop.records import LLM, ModulePlan, ParallelSpec, Plan
from dflop.schedule.assignment import Assignment
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import module_items, stage_durations
from dflop.simulate.events import simulate
from dflop.simulate.kernel import action_at, run_step
from dflop.simulate.pipeline_order import one_f_one_b
from dflop.simulate.step import step_graph, step_nodes
from tests.builders import make_cost, make_link, make_plan, make_specs, random_batch

ENCODERS = ("vision", "audio")


def inline_plan(modules: tuple[str, ...], pp: int, dp: int, num_microbatches: int, cuts: list[int]) -> Plan:
    """A chain of the modules' layers, four each, cut behind `cuts`."""
    base = make_plan({m: 1 for m in modules}, num_microbatches=num_microbatches)
    chain = [m for m in modules for _ in range(4)]
    stages = [chain[a:b] for a, b in zip([0, *cuts], [*cuts, len(chain)], strict=True)]
    placed = tuple(
        ModulePlan(m, ParallelSpec(1, pp, dp), 0, tuple(stage.count(m) for stage in stages), (0,) * pp) for m in modules
    )
    return dataclasses.replace(base, layout="inline", modules=placed)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepEvaluator, Assignment]:
    """Any assignment of a random batch under a random plan of either layout, with links that take time."""
    encoders = draw(st.sampled_from([(), ("vision",), ENCODERS]))
    modules, num_slots = (*encoders, LLM), draw(st.integers(1, 6))
    if draw(st.booleans()):
        dp = {name: draw(st.integers(1, 3)) for name in modules}
        depths = {"llm_pp": draw(st.integers(1, 3)), "encoder_pp": draw(st.integers(1, 2))}
        plan = make_plan(dp, num_microbatches=num_slots, **depths)
    else:
        pp = draw(st.integers(1, 4))
        cuts = draw(st.lists(st.integers(1, 4 * len(modules) - 1), min_size=pp - 1, max_size=pp - 1, unique=True))
        plan = inline_plan(modules, pp, draw(st.integers(1, 3)), num_slots, sorted(cuts))
    batch = random_batch(draw(st.integers(1, 16)), encoders=encoders, seed=draw(st.integers(0, 10_000)))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    items = {m: module_items(batch, m) for m in modules}
    slot, rank = (rng.integers(n, size=len(batch)) for n in (num_slots, plan.module(LLM).parallel.dp))
    ranks = {}
    for e in encoders:
        anywhere = rng.integers(plan.module(e).parallel.dp, size=len(items[e].sample))
        ranks[e] = rank[items[e].sample_of] if plan.is_inline else anywhere
    return StepEvaluator(plan, items, cost_with_links(encoders)), Assignment(slot, rank, ranks)


def cost_with_links(encoders):
    return CostModel(
        make_cost(*encoders).tables, specs=make_specs(*encoders), links=[make_link("p2p", 2, 1, 1e-4, 1e7)],
        extrapolate=True,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(steps())
def test_compiled_step_equals_the_readable_one_to_the_bit(case):
    judge, assignment = case
    work = judge.work(assignment)
    owners = assignment.owners(judge.plan, judge.items)
    done = tuple(judge.items[name].work(owner) for name, owner in owners.items())
    durations = stage_durations(judge.plan, judge.items, owners, judge.cost)
    delays = {
        node: list(zip(work.forward_delay_s[i].tolist(), work.backward_delay_s[i].tolist(), strict=True))
        for i, node in enumerate(step_nodes(judge.plan))
    }
    expected = simulate(step_graph(judge.plan, done, durations, delays))
    start, end = run_step(judge.shape, work)
    assert start.reshape(-1).tolist() == list(expected.start_s)
    assert end.reshape(-1).tolist() == list(expected.end_s)
    assert judge.step_s(assignment) == expected.makespan_s


@given(st.integers(1, 12), st.integers(0, 12))
def test_compiled_order_is_the_engines(num_microbatches, num_after):
    expected = [(a.microbatch, int(a.phase == "B")) for a in one_f_one_b(num_microbatches, num_after)]
    found = [action_at(i, num_microbatches, num_after) for i in range(2 * num_microbatches)]
    assert found == expected
