"""Activations on the host: only behind passes that hide their copies, only as many as the host holds."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dflop.emit.mimo_rules import MimoRules
from dflop.plan.drafts import fits
from dflop.plan.grid_bytes import chain_peaks, largest_loads
from dflop.plan.memory import NUM_WAITING
from dflop.plan.offload import LOCKED_RATIO, offloaded_layers
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, RunMode
from dflop.simulate.order import in_flight
from tests.plan.problems import make_problem
from tests.plan.whole_drafts import inline_choices

M = 1_000_000


def problem_with(host_bytes: float, rate: float = 1e12, memory_bytes: int = 250 * M, **changes: Any) -> Problem:
    made = make_problem("vision", memory_bytes=memory_bytes, max_pp=4, **changes)
    space = dataclasses.replace(made.space, host_bytes=host_bytes, host_bytes_per_s=rate)
    return dataclasses.replace(made, space=space)


def layer_of(problem: Problem, plan: Plan) -> tuple[float, float, float]:
    """Seconds of a layer's shorter pass and its bytes, on an average microbatch, and its bytes on the largest."""
    buckets, loads = plan.num_microbatches * plan.module(LLM).parallel.dp, problem.sample_loads[LLM]
    average, largest = loads.per_microbatch(buckets).mean(axis=-1), loads.largest(buckets)
    passes_s = problem.cost.module_seconds(LLM, average, num_layers=1, edge=False)
    num_bytes = (problem.cost.activation_bytes(LLM, load, num_layers=1, edge=False) for load in (average, largest))
    return min(map(float, passes_s)), *map(float, num_bytes)


@pytest.mark.parametrize(("host_bytes", "rate"), [(80 * M, 1e12), (1e12, 2e8), (30 * M, 3e8)])
def test_copies_hide_and_the_host_holds_them(host_bytes, rate):
    problem, seen = problem_with(host_bytes, rate), 0
    for _, plan in inline_choices(problem, 4, top=None):
        llm, pp = plan.module(LLM), plan.module(LLM).parallel.pp
        pass_s, mean_bytes, most_bytes = layer_of(problem, plan)
        for stage, sent in enumerate(llm.offloaded):
            assert sent + llm.num_recomputed[stage] <= llm.layers_per_stage[stage]
            assert sent * mean_bytes / rate <= 1.001 * llm.layers_per_stage[stage] * pass_s
            assert LOCKED_RATIO * sent * most_bytes * in_flight(4, pp - 1 - stage) <= host_bytes
            seen += sent
        assert fits(problem, plan)
    assert seen, "the case tests nothing"


def test_a_layer_on_the_host_keeps_nothing_but_two_wait_for_their_copies():
    problem = problem_with(1e12)
    plan = next(p for _, p in inline_choices(problem, 4, top=None) if any(p.module(LLM).offloaded))
    llm = plan.module(LLM)
    bare = dataclasses.replace(plan, modules=(*plan.modules[:-1], dataclasses.replace(llm, offloaded=())))
    loads = largest_loads(problem, plan, plan.modules)
    with_host, without = (chain_peaks(problem, of, of.modules, loads)[0] for of in (plan, bare))
    layer = layer_of(problem, plan)[2]
    pp, sent = llm.parallel.pp, np.array(llm.offloaded)
    gone = sent * in_flight(4, np.arange(pp)[::-1])
    saved = (without - with_host) / layer
    assert (saved <= gone + 1e-6).all()
    assert (saved >= gone - np.minimum(sent, NUM_WAITING) - 1e-6).all()


def test_the_host_takes_the_place_of_recomputation():
    without, with_host = (plan_problem(problem_with(host))[0] for host in (0.0, 1e12))
    assert sum(without.module(LLM).num_recomputed) > 0 == sum(without.module(LLM).offloaded)
    assert sum(with_host.module(LLM).offloaded) > 0
    assert with_host.predicted_step_s < without.predicted_step_s


def test_other_trainers_and_hosts_without_room_get_none():
    layers, depth, dp = np.array([[4]]), np.array([1]), np.array([1])
    for problem in (problem_with(0.0), problem_with(1e12, rules=MimoRules())):
        assert not offloaded_layers(problem, layers, layers, 4, depth, RunMode(), dp=dp).any()
    assert offloaded_layers(problem_with(1e12), layers, layers, 4, depth, RunMode(), dp=dp).tolist() == [[4]]
