import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.cost.model import CostModel
from dflop.records import LLM, ModulePlan, ParallelSpec, Plan
from dflop.schedule.assignment import Assignment
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import module_items
from dflop.simulate.kernel import run_step
from dflop.simulate.step import EXPOSED_FRAC, step_nodes
from tests.builders import make_cost, make_link, make_plan, make_specs, random_batch
from tests.schedule.steps import stage_durations
from tests.simulate.graph import simulate, step_graph

ENCODERS = ("vision", "audio")


def inline_plan(modules: tuple[str, ...], pp: int, dp: int, num_microbatches: int, cuts: list[int]) -> Plan:
    """A chain of the modules' layers, four each, cut behind `cuts`."""
    base = make_plan({m: 1 for m in modules}, num_microbatches=num_microbatches)
    chain = [m for m in modules for _ in range(4)]
    stages = [chain[a:b] for a, b in zip([0, *cuts], [*cuts, len(chain)], strict=True)]
    placed = tuple(
        ModulePlan(m, ParallelSpec(1, pp, dp), 0, tuple(stage.count(m) for stage in stages), (0,) * pp) for m in modules
    )
    return dataclasses.replace(base, modules=placed)


def sharing(draw: st.DrawFn, m: ModulePlan) -> ModulePlan:
    """The module with its parameters shared out over some of its replicas, or over none."""
    shards, pp = draw(st.sampled_from([1, 1, 2, m.parallel.dp])), m.parallel.pp
    if shards > m.parallel.dp or shards == 1:
        return m
    seconds = draw(st.sampled_from([0.0, 0.01]))
    return dataclasses.replace(m, parameter_shards=shards, gather_s=(seconds,) * pp, scatter_s=(seconds / 2,) * pp)


def meet(plan: Plan, durations):
    """Durations of which a group that shares out a module's parameters has the longest, and what messages add to it."""
    found = {}
    for (module, stage, rank), own in durations.items():
        m = plan.module(module)
        group = range(rank - rank % m.parameter_shards, rank - rank % m.parameter_shards + m.parameter_shards)
        others = [durations[module, stage, r] for r in range(m.parallel.dp)]
        found[module, stage, rank] = list(own)
        for k in range(plan.num_microbatches if m.parameter_shards > 1 else 0):
            if any(sum(of[k]) for of in others):
                messages = (m.gather_s[stage], m.gather_s[stage] + m.scatter_s[stage])
                slowest = (max(others[r][k][p] for r in group if r < m.parallel.dp) for p in (0, 1))
                found[module, stage, rank][k] = tuple(
                    max(own_s + EXPOSED_FRAC * of_s, of_s) for own_s, of_s in zip(slowest, messages, strict=True)
                )
    return found


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
        if encoders and draw(st.booleans()):  # the first encoder has a rank of its own
            alone = ModulePlan(modules[0], ParallelSpec(1, 1, 1), plan.num_processes, (4,), (0,))
            plan = dataclasses.replace(plan, modules=(alone, *plan.modules[1:]))
    plan = dataclasses.replace(plan, modules=tuple(sharing(draw, m) for m in plan.modules))
    batch = random_batch(draw(st.integers(1, 16)), encoders=encoders, seed=draw(st.integers(0, 10_000)))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    items = {m: module_items(batch, m) for m in modules}
    slot, rank = (rng.integers(n, size=len(batch)) for n in (num_slots, plan.module(LLM).parallel.dp))
    ranks = {}
    for e in encoders:
        anywhere = rng.integers(plan.module(e).parallel.dp, size=len(items[e].sample))
        ranks[e] = rank[items[e].sample_of] if plan.follows_samples(e) else anywhere
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
    expected = simulate(step_graph(judge.plan, done, meet(judge.plan, durations), delays))
    start, end = run_step(judge.shape, work)
    want_start, want_end = (np.array(times_s).reshape(end.shape) for times_s in (expected.start_s, expected.end_s))
    assert start.ravel() == pytest.approx(want_start.ravel())
    assert end.tolist() == want_end.tolist()
    assert judge.step_s(assignment) == expected.makespan_s
