from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import best_last_stage, module_candidates, shard_choices, spread_layers
from dflop.plan.scenarios import scenario_loads
from dflop.plan.space import SearchSpace
from dflop.records import LLM
from dflop.schedule.pack import token_cap
from tests.builders import make_sample
from tests.plan.problems import make_problem


def slowest(layers, layer_s: float, edge_s: float) -> float:
    return max(n * layer_s + edge_s * (i == len(layers) - 1) for i, n in enumerate(layers))


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0.1, 10), st.floats(0, 30))
def test_layer_split_is_the_best_of_all(num_layers, pp, layer_s, edge_s):
    if pp > num_layers:
        return
    layers = spread_layers(num_layers, pp, best_last_stage(num_layers, pp, layer_s, edge_s))
    assert sum(layers) == num_layers
    assert min(layers) >= 1
    every = [c for c in itertools.product(range(1, num_layers + 1), repeat=pp) if sum(c) == num_layers]
    assert slowest(layers, layer_s, edge_s) == min(slowest(c, layer_s, edge_s) for c in every)


def degrees(problem, module: str = LLM, num_microbatches: int = 1) -> list[tuple[int, int, int]]:
    found = module_candidates(problem, problem.spec(module), num_microbatches)
    return [tuple(row) for row in found.content[:, :3].tolist()]


def test_candidates_respect_every_limit():
    problem = make_problem(num_processes=6, max_pp=3, recompute=(False,), shard_parameters=(False,))
    assert degrees(problem, num_microbatches=12) == [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (1, 3, 1), (1, 3, 2)]
    assert max(dp for _, _, dp in degrees(problem)) == 6
    beside = make_problem("vision", "audio", num_processes=6, recompute=(False,))
    assert max(tp * pp * dp for tp, pp, dp in degrees(beside)) == 4


def test_a_tensor_parallel_group_fills_nodes_evenly():
    one_node = make_problem(num_processes=6, tps=(1, 2, 4, 8))
    assert {tp for tp, _, _ in degrees(one_node)} == {1, 2, 4}
    assert {tp for tp, _, _ in degrees(dataclasses.replace(one_node, space=SearchSpace(tps=(2,))))} == {2}
    two_nodes = make_problem(num_processes=6, num_nodes=2, tps=(1, 2, 4, 8))
    assert {tp for tp, _, _ in degrees(two_nodes)} == {1, 2}


def test_ways_to_save_memory_are_as_allowed():
    def content(**space: object) -> set[tuple[int, bool, bool]]:
        problem = make_problem(num_processes=2, **space)
        found = module_candidates(problem, problem.specs[0], 1)
        return {(s, bool(r), bool(z)) for dp, s, r, z in found.content[:, 2:].tolist() if dp == 2}

    assert content() == set(itertools.product((1, 2), (False, True), (True,)))
    assert content(recompute=(True,)) == {(1, True, True), (2, True, True)}
    assert content(shard_optimizer=False, recompute=(False,)) == {(1, False, False), (2, False, True)}
    assert content(shard_parameters=(True,), recompute=(False,)) == {(2, False, True)}


def test_replicas_share_parameters_over_whole_nodes_or_all_of_them():
    problem = make_problem(num_processes=4, num_nodes=3)
    none, node, every = (shards.tolist() for shards in shard_choices(problem, 2, np.array([1, 2, 3, 4, 6])))
    assert (none, node, every) == ([1] * 5, [0, 0, 0, 2, 2], [0, 2, 3, 4, 6])


def test_groups_that_share_samples_fill_nodes_of_gpus():
    problem = make_problem(num_processes=8, num_nodes=2)
    on_gpus = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, device="cuda"))
    assert [on_gpus.cps(tp) for tp in (1, 2, 4, 8)] == [[1, 2, 4, 8], [1, 2, 4], [1, 2], [1]]
    assert problem.cps(1) == [1]
    wanted = make_problem(num_processes=6, cps=(3, 2, 4))
    assert [wanted.cps(tp) for tp in (1, 2, 3)] == [[2, 3], [3], [2]]
    none, node, every = (of.tolist() for of in shard_choices(problem, 2, 2 * np.array([1, 2, 4])))
    assert (none, node, every) == ([1] * 3, [0, 0, 4], [2, 4, 8]), "a group's replicas are among those that share"


def test_large_clusters_skip_odd_degrees_but_not_those_that_tile_them():
    problem = make_problem(num_processes=8, num_nodes=20)
    dps = problem.dps(160)
    assert set(range(1, 17)) | {18, 20, 32, 40, 64, 80, 96, 128, 160} <= set(dps)
    assert not {17, 19, 22, 100} & set(dps)
    assert make_problem(num_processes=8, num_nodes=8).dps(64) == list(range(1, 65))


def test_numbers_of_microbatches():
    every = SearchSpace().microbatch_choices(256)
    assert every[:21] == (*range(1, 17), 18, 20, 22, 24, 28)
    assert every[21:] == (32, 36, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256)
    assert SearchSpace().microbatch_choices(5) == (1, 2, 3, 4, 5)
    assert SearchSpace(microbatches=(8, 2, 8, 99)).microbatch_choices(24) == (2, 8)
    with pytest.raises(InfeasiblePlanError, match=r"\[32, 64\] is between 1 and the global batch of 24"):
        SearchSpace(microbatches=(64, 32)).microbatch_choices(24)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 50))
def test_largest_llm_microbatch_is_the_schedulers_cap(lengths, num_buckets):
    loads = scenario_loads([[make_sample(i, n) for i, n in enumerate(lengths)]], LLM)
    _, num_tokens, sum_sq_tokens = largest = loads.largest(num_buckets).tolist()
    assert num_tokens == token_cap(np.array(lengths), num_buckets)
    assert sum_sq_tokens == num_tokens * max(lengths)
    assert loads.largest(np.array([num_buckets, 1]))[:, 0].tolist() == largest


def test_media_stay_with_their_sample_only_inline():
    batch = [
        make_sample(0, 5, [("vision", 30), ("vision", 50)]),
        make_sample(1, 5),
        make_sample(2, 5, [("vision", 60)]),
    ]
    items, samples = (scenario_loads([batch], "vision", whole_samples=whole) for whole in (False, True))
    assert (items.longest[:, 0].tolist(), samples.longest[:, 0].tolist()) == ([1, 60, 3600], [2, 80, 3600])
    assert items.total.tolist() == samples.total.tolist() == [[3], [140], [7000]]
    assert (items.num_units.tolist(), samples.num_units.tolist()) == ([3], [3])
    assert samples.units[0].tolist() == [[2, 0, 1], [80, 0, 60], [3400, 0, 3600]]
    assert items.per_microbatch(2)[1].tolist() == [70.0]
    assert items.per_microbatch(np.array([1, 2, 9]))[1, :, 0].tolist() == [140.0, 70.0, 140 / 3]
