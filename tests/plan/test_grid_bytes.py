import dataclasses

import numpy as np
import pytest

from dflop.plan.drafts import charged, draft, fits, holding
from dflop.plan.grid_bytes import SLACK, chain_bytes, grid_depth, largest_loads, scaled
from dflop.plan.grid_choice import GridChoice
from dflop.plan.space import Problem
from dflop.records import LLM, ParallelSpec, Plan
from tests.plan.problems import make_problem

M = 1_000_000
LAYOUTS = {
    "one stage": (ParallelSpec(1, 1, 2), {"vision": (4,), LLM: (4,)}),
    "context parallel": (ParallelSpec(1, 1, 1, 2), {"vision": (4,), LLM: (4,)}),
    "pipeline": (ParallelSpec(1, 2, 2), {"vision": (4, 0), LLM: (1, 3)}),
}


def plan_of(problem: Problem, name: str, **how: object) -> Plan:
    parallel, layers = LAYOUTS[name]
    return draft(problem, 4, [GridChoice.of(parallel, layers, shard_optimizer=True, **how)], 1.0, per_microbatch=True)


def limited_plans(name: str) -> list[tuple[Problem, Plan]]:
    problems = (make_problem("vision", max_pp=4, memory_bytes=memory * M) for memory in range(100, 600, 25))
    pairs = [(problem, plan_of(problem, name)) for problem in problems]
    return [(problem, plan) for problem, plan in pairs if fits(problem, plan) and plan.module(LLM).recompute_tokens]


def held(problem: Problem, plan: Plan, stage: int, tokens: int, num_again: int | None = None) -> tuple[float, ...]:
    """(state, kept, once) of a stage with one microbatch, of whose media there is as much as may be."""
    llm, largest = plan.module(LLM), largest_loads(problem, plan, plan.modules)
    media = [scaled(x, m.max_tokens) for x, m in zip(largest[:-1], plan.encoders, strict=True)]
    again = [[llm.num_rerun(s, tokens) if num_again is None else num_again for s in range(llm.parallel.pp)]]
    found = chain_bytes(
        problem, plan, plan.modules, [*media, scaled(largest[-1], tokens)], np.minimum(again, llm.layers_per_stage)
    )
    return tuple(float(x[0, stage]) for x in (found.state, found.kept, found.once))


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_holds_any_mix_of_microbatches_in_flight(name):
    rng, some = np.random.default_rng(0), limited_plans(name)
    assert some
    for problem, plan in some:
        llm = plan.module(LLM)
        edges = [limit + more for of_stage in llm.recompute_tokens for limit in of_stage for more in (0, 1)]
        sizes = [t for t in [*edges, 1, llm.max_tokens, *rng.integers(1, llm.max_tokens + 1, 5)] if t <= llm.max_tokens]
        for stage, depth in enumerate(grid_depth(plan, plan.modules).tolist()):
            parts = [held(problem, plan, stage, int(t)) for t in sizes]
            most_kept, most_at_work = max(kept for _, kept, _ in parts), max(kept + once for _, kept, once in parts)
            assert parts[0][0] + (depth - 1) * most_kept + most_at_work <= problem.usable_bytes


@pytest.mark.parametrize("name", ["one stage", "context parallel"])
def test_alone_in_memory_a_limit_is_the_largest_that_fits(name):
    for problem, plan in limited_plans(name):
        for level, limit in enumerate(plan.module(LLM).recompute_tokens[0]):
            if limit:
                assert sum(held(problem, plan, 0, limit, level)) <= problem.usable_bytes
            assert sum(held(problem, plan, 0, limit + 1, level)) > problem.usable_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_limits_hold_larger_microbatches_than_the_same_layers_of_all_of_them_would(name):
    for problem, plan in limited_plans(name):
        llm, (*_, largest) = plan.module(LLM), largest_loads(problem, plan, plan.modules)
        assert largest[1] <= llm.max_tokens <= SLACK * largest[1]
        assert all(
            list(of) == sorted(of) and len(of) <= n
            for of, n in zip(llm.recompute_tokens, llm.layers_per_stage, strict=True)
        )
        assert all(limit < llm.max_tokens for of in llm.recompute_tokens for limit in of)


def test_there_are_none_where_everything_fits_or_one_way_is_left():
    roomy, tight = make_problem("vision", memory_bytes=2000 * M), limited_plans("one stage")[0][0]
    plain = draft(roomy, 4, [GridChoice.of(*LAYOUTS["one stage"], shard_optimizer=True)], 1.0)
    assert plan_of(roomy, "one stage") == plain
    for way in (False, True):
        space = dataclasses.replace(tight.space, recompute=(way,))
        assert (
            not plan_of(dataclasses.replace(tight, space=space), "one stage", recompute=way)
            .module(LLM)
            .recompute_tokens
        )


def test_other_batches_have_other_limits_of_the_same_plan():
    problem, plan = limited_plans("one stage")[-1]
    assert charged(problem, plan) == plan
    more = dataclasses.replace(problem, batches=(problem.batches[0][:12], problem.batches[0]))
    assert (found := holding(more, plan)) is not None
    assert found.plan_id == plan.plan_id
    assert found.module(LLM).recompute_tokens
