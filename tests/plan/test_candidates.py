from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import shard_choices
from dflop.plan.scenarios import scenario_loads
from dflop.plan.space import SearchSpace
from dflop.records import LLM, RunMode
from dflop.schedule.pack import token_cap
from tests.builders import make_sample
from tests.plan.problems import make_problem


def test_replicas_share_parameters_over_whole_nodes_or_all_of_them():
    problem = make_problem(num_processes=4, num_nodes=3)
    none, node, every = (shards.tolist() for shards in shard_choices(problem, RunMode(2), np.array([1, 2, 3, 4, 6])))
    assert (none, node, every) == ([1] * 5, [0, 0, 0, 2, 2], [0, 2, 3, 4, 6])


def test_groups_that_share_samples_fill_nodes_of_gpus():
    problem = make_problem(num_processes=8, num_nodes=2)
    on_gpus = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, device="cuda"))
    assert [on_gpus.cps(tp) for tp in (1, 2, 4, 8)] == [[1, 2, 4, 8], [1, 2, 4], [1, 2], [1]]
    assert problem.cps(1) == [1]
    wanted = make_problem(num_processes=6, cps=(3, 2, 4))
    assert [wanted.cps(tp) for tp in (1, 2, 3)] == [[2, 3], [3], [2]]
    assert make_problem(num_processes=6, cps=(3, 2, 4), whole_samples="states").cps(1) == [1]
    none, node, every = (of.tolist() for of in shard_choices(problem, RunMode(2, cp=2), np.array([1, 2, 4])))
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
