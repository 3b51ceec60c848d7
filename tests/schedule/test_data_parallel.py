"""Pure data parallelism: what is promised about any global batch, and what is reached on lengths as they occur."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.schedule import rank_kernel
from dflop.schedule.data_parallel import Rerun, balance_ranks
from dflop.schedule.pack import token_cap, token_lpt
from dflop.schedule.rank_kernel import NOBODY, RankProblem, first_fit, greedy, improve

PUT, TAKE, EXCHANGE = (
    getattr(k, "py_func", k) for k in (rank_kernel._put, rank_kernel._take, rank_kernel._best_exchange)
)
SYNCS = ("step", "microbatch")


def lengths(seed: int, num_samples: int, longest: int = 8192) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(700), 1.0, num_samples)
    return np.clip(drawn, 30, longest).astype(np.int64)


def seconds(tokens: np.ndarray) -> np.ndarray:
    """A 7B decoder: linear layers and attention."""
    return 3e-4 * tokens + 1.3e-8 * tokens.astype(float) ** 2


def step_s(s, bucket, num_ranks, num_slots, fixed_s, sync, slowness=1.0, rerun=None, tokens=None) -> float:
    """The objective, in words of its own."""
    load = np.bincount(bucket, s, num_ranks * num_slots)
    load += fixed_s * (np.bincount(bucket, minlength=load.size) > 0)
    for limit in rerun.limits if rerun else ():
        again_s = np.bincount(bucket, rerun.seconds_s, load.size) + rerun.fixed_s
        load += again_s * (np.bincount(bucket, tokens, load.size) > limit)
    load = load.reshape(num_slots, num_ranks) * slowness
    return float(load.sum(axis=0).max() if sync == "step" else load.max(axis=1).sum())


@st.composite
def problems(draw):
    num_samples = draw(st.integers(1, 40))
    tokens = np.array(draw(st.lists(st.integers(1, 500), min_size=num_samples, max_size=num_samples)))
    s = np.array(draw(st.lists(st.floats(0, 5), min_size=num_samples, max_size=num_samples)))
    given = {
        "num_ranks": draw(st.integers(1, 6)),
        "fixed_s": draw(st.sampled_from([0.0, 0.3, 2.0])),
        "sync": draw(st.sampled_from(SYNCS)),
        "cap_tokens": draw(st.integers(100, 2000)),
        "rerun": draw(st.none() | st.just(Rerun(0.2 * s, 0.1, (20, 80, 99)))),
    }
    num_microbatches = draw(st.none() | st.integers(1, 4))
    if num_microbatches:
        given["num_microbatches"] = num_microbatches
        given["cap_tokens"] = token_cap(tokens, num_microbatches * given["num_ranks"])
    return s, tokens, given


DENORMAL = {"num_ranks": 1, "fixed_s": 0.0, "sync": "step", "cap_tokens": 100, "rerun": None}


FREE = {"num_ranks": 1, "fixed_s": 0.0, "sync": "step", "cap_tokens": 100, "rerun": Rerun(np.zeros(1), 0.1, (20,))}


@settings(max_examples=80, deadline=None)
@example((np.array([5e-324]), np.array([1]), DENORMAL))
@example((np.zeros(1), np.array([30]), FREE))
@given(problems())
def test_every_sample_once_within_the_cap_no_rank_without_work_and_never_worse_than_simple_orders(problem):
    s, tokens, given = problem
    found = balance_ranks(s, tokens, **given)
    num_ranks, num_slots = given["num_ranks"], found.num_microbatches
    assert found.rank.shape == found.slot.shape == s.shape
    assert ((found.rank >= 0) & (found.rank < num_ranks)).all()
    assert ((found.slot >= 0) & (found.slot < num_slots)).all()
    bucket = found.slot * num_ranks + found.rank
    counts = np.bincount(bucket, minlength=num_ranks * num_slots)
    over = np.bincount(bucket, tokens, num_ranks * num_slots) > given["cap_tokens"]
    assert (counts[over] == 1).all()
    assert over.sum() == found.num_over_cap == (tokens > given["cap_tokens"]).sum()
    if len(s) >= len(counts):
        assert counts.min() >= 1
    again = {"rerun": given["rerun"], "tokens": tokens}
    told = step_s(s, bucket, num_ranks, num_slots, given["fixed_s"], given["sync"], **again)
    assert found.step_s == pytest.approx(told, rel=1e-9, abs=1e-9)
    assert found.lower_bound_s <= found.step_s
    for rival in (np.arange(len(s)) * len(counts) // len(s), token_lpt(tokens, len(counts))):
        if np.bincount(rival, tokens).max() <= given["cap_tokens"]:
            theirs = step_s(s, rival, num_ranks, num_slots, given["fixed_s"], given["sync"], **again)
            assert found.step_s <= theirs * (1 + 1e-9) + 1e-9, "arrival order, or longest first on tokens"


@pytest.mark.parametrize("longest", [8192, 32768])
@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_samples_on_64_ranks_are_a_thousandth_from_the_bound(seed, longest):
    tokens = lengths(seed, 1024, longest)
    cap = token_cap(tokens, 64)
    found = balance_ranks(seconds(tokens), tokens, 64, cap_tokens=cap, num_microbatches=1)
    assert found.step_s <= 1.001 * found.lower_bound_s
    arrival = step_s(seconds(tokens), np.arange(1024) * 64 // 1024, 64, 1, 0.0, "step")
    assert arrival > 1.2 * found.step_s


@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_meet_in_every_microbatch_get_similar_sizes_side_by_side(seed):
    tokens = lengths(seed, 512, 32768)
    s, cap = seconds(tokens), token_cap(tokens, 32)
    free = balance_ranks(s, tokens, 8, cap_tokens=2 * cap, num_microbatches=4, sync="microbatch")
    assert free.step_s <= 1.002 * free.lower_bound_s
    found = balance_ranks(s, tokens, 8, cap_tokens=cap, num_microbatches=4, sync="microbatch")
    assert found.step_s <= 1.05 * found.lower_bound_s  # what is beside a long sample may not be as many tokens
    by_step = balance_ranks(s, tokens, 8, cap_tokens=cap, num_microbatches=4, sync="step")
    theirs = step_s(s, by_step.slot * 8 + by_step.rank, 8, 4, 0.0, "microbatch")
    assert theirs > found.step_s


def test_as_few_microbatches_as_the_cap_allows():
    tokens = np.full(16, 100)
    assert balance_ranks(tokens * 1.0, tokens, 2, cap_tokens=800).num_microbatches == 1
    assert balance_ranks(tokens * 1.0, tokens, 2, cap_tokens=799).num_microbatches == 2
    assert balance_ranks(tokens * 1.0, tokens, 2, cap_tokens=199).num_microbatches == 8


def test_a_tight_cap_is_kept_although_seconds_ask_for_something_else():
    tokens = np.array([5, 5, 5, 5, 2, 2, 2, 2, 2, 2])  # two bins of 16 hold them in few ways
    s = np.array([1.0, 1, 1, 1, 5, 5, 5, 5, 5, 5])
    found = balance_ranks(s, tokens, 2, cap_tokens=16, num_microbatches=1)
    assert np.bincount(found.rank, tokens).max() <= 16
    assert found.step_s == 17


def test_what_cannot_fit_says_what_would():
    with pytest.raises(ConfigError, match="do not fit into 2 microbatch") as error:
        balance_ranks(np.ones(9), np.full(9, 100), 2, cap_tokens=150, max_microbatches=2)
    assert "5 microbatches would suffice" in error.value.hint


def test_no_samples_are_no_work():
    found = balance_ranks(np.zeros(0), np.zeros(0, dtype=np.int64), 4, cap_tokens=1)
    assert found.step_s == found.lower_bound_s == 0


@pytest.mark.parametrize("wrong", [np.array([1.0, -1.0]), np.array([1.0, np.nan]), np.array([1.0])])
def test_seconds_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="seconds"):
        balance_ranks(wrong, np.array([1, 1]), 1, cap_tokens=2)


@st.composite
def crowds(draw):
    """Problems of many cells: many of them equal, caps that bind, paces of all kinds."""
    num_ranks, num_slots = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    num = draw(st.integers(1, 120))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    cap = draw(st.sampled_from([8, 20, 1000]))
    paces = draw(st.sampled_from([(1,), (1024, 1331), tuple(range(1000, 1040))]))
    by_slot = draw(st.booleans())
    return RankProblem(
        weights=rng.integers(0, draw(st.sampled_from([3, 1 << 40])), num), tokens=rng.integers(1, 8, num),
        num_ranks=num_ranks, num_cells=num_ranks * num_slots if by_slot else num_ranks,
        num_buckets=num_ranks * num_slots, cap=cap, fixed=draw(st.sampled_from([0, 1, 1 << 30])),
        pace=rng.choice(np.array(paces), num_ranks),
        limits=np.sort(rng.integers(0, cap, draw(st.sampled_from([0, 0, 3])))),
        rerun=rng.integers(0, draw(st.sampled_from([1, 1 << 38])), num),
        rerun_fixed=draw(st.sampled_from([0, 1 << 30])),
    )  # fmt: skip


def greedy_slowly(p: RankProblem, weights, num_cells, pace):
    """The rule of `greedy`, everything looked at for every sample; None where one finds no room."""
    bucket, loads = np.zeros(len(weights), dtype=np.int64), np.zeros(num_cells, dtype=np.int64)
    filled = np.zeros(p.num_buckets, dtype=np.int64)
    for i in np.argsort(-weights, kind="stable"):
        emptiest = filled.reshape(-1, num_cells).argmin(axis=0) * num_cells + np.arange(num_cells)
        after = loads + weights[i] * np.tile(pace, num_cells // p.num_ranks)
        has_room = filled[emptiest] + p.tokens[i] <= p.cap
        if not has_room.any():
            return None
        cell = int(np.where(has_room, after, np.iinfo(np.int64).max).argmin())
        bucket[i], loads[cell] = emptiest[cell], after[cell]
        filled[bucket[i]] += p.tokens[i]
    return bucket


@settings(max_examples=60, deadline=None)
@given(crowds(), st.booleans(), st.sampled_from([300, 20_000]))
def test_the_greedy_start_follows_its_rule_and_is_only_improved(p, by_tokens, max_evals):
    bins = first_fit(p.tokens, p.cap)
    assert np.bincount(bins, p.tokens).max() <= p.cap
    weights, cells = (p.tokens, p.num_buckets) if by_tokens else (p.weights, p.num_cells)
    start = greedy(p, weights, cells, p.pace)
    expected = greedy_slowly(p, weights, cells, p.pace)
    assert (start is None) == (expected is None)
    if start is None:
        return
    assert (start == expected).all()
    better = improve(p, start, 0, max_evals)
    assert p.step(better) <= p.step(start)
    assert np.bincount(better, p.tokens).max() <= p.cap
    if p.keep_full and np.bincount(start, minlength=p.num_buckets).min() > 0:
        assert np.bincount(better, minlength=p.num_buckets).min() > 0
    loads = np.sort(p.loads(better))
    if (
        p.cap == 1000
        and p.num_cells == p.num_ranks
        and not p.is_uneven
        and not p.fixed
        and not len(p.limits)
        and max_evals > 300
    ):
        lightest = p.weights[(better % p.num_cells) == int(p.loads(better).argmax())].min(initial=1 << 62)
        assert loads[-1] - loads[0] <= lightest or p.keep_full, "moving the lightest sample would be better"


@settings(max_examples=60, deadline=None)
@given(crowds(), st.data())
def test_loads_stay_those_of_the_samples_and_of_the_layers_that_run_again(p, data):
    buckets = st.integers(0, p.num_buckets - 1)
    where = np.array(data.draw(st.lists(buckets, min_size=len(p.weights), max_size=len(p.weights))))
    now = rank_kernel.empty(p, len(where))
    for i, b in enumerate(where.tolist()):
        PUT(p, now, i, b)
    assert now.loads.tolist() == p.loads(where).tolist()
    heavy, light = data.draw(st.tuples(*[st.integers(0, p.num_cells - 1)] * 2).filter(lambda pair: pair[0] != pair[1]))
    goal = light + p.num_cells * data.draw(st.integers(0, p.num_buckets // p.num_cells - 1))
    slack = int(now.loads[heavy] - now.loads[light])
    value, i, j = EXCHANGE(p, False, now, heavy, light, goal, slack)
    if i == NOBODY:
        return
    TAKE(p, now, i)
    source, where[i] = where[i], goal if j == NOBODY else where[j]
    if j != NOBODY:
        TAKE(p, now, j)
        PUT(p, now, j, source)
        where[j] = source
    PUT(p, now, i, where[i])
    assert now.loads.tolist() == p.loads(where).tolist()
    assert value == max(now.loads[heavy], now.loads[light])


@pytest.mark.parametrize("seed", range(3))
def test_a_search_closes_what_greed_leaves_open(seed):
    rng = np.random.default_rng(seed)
    weights, ones = rng.integers(1 << 20, 1 << 24, 64), np.ones(64, dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    p = RankProblem(weights, ones, 8, 8, 8, 64, 0, ones[:8], none, 0 * ones, 0)
    start = greedy(p, weights, 8, p.pace)
    assert p.step(improve(p, start, 0, 200_000)) <= 1.001 * weights.sum() / 8 < p.step(start)
