"""Samples and rollouts dealt by cost: next to Karmarkar-Karp on tokens, with equal counts and with groups."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.balance import deal
from dflop.balance.samples import text_costs
from dflop.errors import ConfigError
from dflop.schedule.pack import over_ranks

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


def slowest(lengths, rank, num_ranks):
    return np.bincount(rank, text_costs(np.asarray(lengths)), num_ranks).max()


@given(LENGTHS, st.integers(1, 5), st.none() | st.integers(200, 8000))
def test_every_sample_is_dealt_once_and_microbatches_keep_the_limit(lengths, num_ranks, max_tokens):
    plan = deal(lengths, num_ranks, max_tokens=max_tokens)
    dealt = [plan.of_rank(rank) for rank in range(num_ranks)]
    assert {len(of) for of in dealt} == {plan.num_microbatches}
    microbatches = [positions for of in dealt for positions in of]
    assert sorted(np.concatenate(microbatches).tolist()) == list(range(len(lengths)))
    for positions in microbatches:
        assert max_tokens is None or len(positions) <= 1 or sum(lengths[i] for i in positions) <= max_tokens


@given(LENGTHS, st.integers(1, 5), st.integers(1, 6))
def test_counts_are_equal_where_that_is_asked_and_groups_stay_together(lengths, num_ranks, size):
    groups = [i // size for i in range(len(lengths))]
    plan = deal(lengths, num_ranks, groups=groups, equal_counts=True)
    of_group = {group: {int(plan.rank[i]) for i in range(len(lengths)) if groups[i] == group} for group in groups}
    assert all(len(ranks) == 1 for ranks in of_group.values())
    counts = Counter(next(iter(ranks)) for ranks in of_group.values())
    assert max(counts.values()) <= -(-len(of_group) // num_ranks)


def test_long_tailed_rollouts_are_dealt_more_evenly_than_by_tokens():
    """As trainers of policies deal them: Karmarkar-Karp on tokens, which do not tell what attention costs."""
    ratios = []
    for seed in range(20):
        lengths = np.clip(np.random.default_rng(seed).lognormal(7.0, 1.2, 256), 16, 32_768).astype(int)
        by_tokens, plan = over_ranks(lengths, 16, 1)[1], deal(lengths, 16)
        assert plan.step_s <= slowest(lengths, by_tokens, 16) * (1 + 1e-9)
        ratios.append(slowest(lengths, by_tokens, 16) / plan.step_s)
    assert np.mean(ratios) > 1.1


def test_costs_are_those_that_are_given():
    costs = [5.0, 1.0, 1.0, 3.0]
    for given_as in (costs, costs.__getitem__):
        plan = deal([1, 1, 1, 1], 2, given_as)
        assert sorted(sum(costs[i] for i in plan.of_rank(rank)[0]) for rank in range(2)) == [5.0, 5.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"costs": [1.0]}, "2 lengths, 1 costs"),
        ({"groups": ["a"]}, "2 lengths, 2 costs and 1 samples in groups"),
        ({"lengths": [3, -1]}, "lengths of sample 1 is -1"),
        ({"equal_counts": True, "max_tokens": 9}, "equal_counts with max_tokens=9"),
        ({"num_microbatches": 1, "max_tokens": 3, "num_ranks": 1}, "do not fit"),
    ],
)
def test_what_cannot_be_dealt_is_refused(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        deal(**{"lengths": [2, 3], "num_ranks": 2, **given})
