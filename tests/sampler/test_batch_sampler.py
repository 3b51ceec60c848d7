"""What the batch sampler promises: every sample once, the same global batches for anyone, state in a few integers."""

import dataclasses
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dflop.errors import ConfigError
from dflop.sampler import BalancedBatchSampler, sample_costs
from tests.test_imports import run_without

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1, 203), 5, 3000).astype(int).tolist()


def make(rank=0, world=1, size=32, lengths=LENGTHS, **given) -> BalancedBatchSampler:
    return BalancedBatchSampler(lengths, size, rank=rank, num_replicas=world, **given)


def global_batches(world: int, num_steps: int, **given) -> list[set[int]]:
    """Samples of each step, over all ranks; fails when two ranks have one in common."""
    samplers = [make(rank, world, **given) for rank in range(world)]
    found = []
    for steps in zip(*(s.steps(until=num_steps) for s in samplers), strict=True):
        assert len({len(step) for step in steps}) == 1
        drawn = [i for step in steps for microbatch in step for i in microbatch]
        assert len(drawn) == len(set(drawn))
        found.append(set(drawn))
    return found


@settings(max_examples=25, deadline=None)
@given(
    num_samples=st.integers(12, 120), size=st.integers(12, 40), world=st.integers(1, 4), slots=st.integers(1, 3),
    sync=st.sampled_from(["step", "microbatch"]), seed=st.integers(0, 2**63), padded=st.booleans(),
    drop_last=st.booleans(), window=st.integers(1, 4),
)  # fmt: skip
def test_every_sample_once_per_epoch_over_all_ranks(num_samples, size, world, slots, drop_last, **given):
    """The rest of an epoch too, however few samples it has; what a rank repeats there does not count."""
    if drop_last and num_samples < size:
        return
    given |= {"num_microbatches": slots, "lengths": LENGTHS[:num_samples], "ahead": 0, "drop_last": drop_last}
    drawn = []
    for rank in range(world):
        sampler = make(rank, world, size, **given)
        microbatches = list(sampler)
        assert len(microbatches) == len(sampler)
        assert all(microbatches)
        fillers = [f for n in range(sampler.steps_per_epoch) for f in sampler.planned(n).is_filler(rank)]
        drawn += [i for m, f in zip(microbatches, fillers, strict=True) if not f for i in m]
    expected = num_samples - num_samples % size if drop_last else num_samples
    assert len(drawn) == len(set(drawn)) == expected


def test_what_an_epoch_drops_does_not_begin_the_next():
    sampler = make(size=32, drop_last=True)
    drawn = [sorted(i for m in step for i in m) for step in sampler.steps(until=3 * 6)]
    for first in (0, 6, 12):
        assert len({i for batch in drawn[first : first + 6] for i in batch}) == 6 * 32


def test_global_batches_are_the_same_for_any_number_of_ranks_microbatches_and_any_costs():
    expected = global_batches(1, 10)
    assert len(expected) == 10
    assert global_batches(2, 10) == expected
    assert global_batches(3, 10, num_microbatches=2) == expected
    assert global_batches(2, 10, num_microbatches=4, sync="microbatch", lengths=LENGTHS[::-1]) == expected


def test_with_a_cap_on_tokens_the_count_varies_and_the_cap_holds():
    samplers = [make(rank, 2, max_tokens=2000) for rank in range(2)]
    counts, drawn = set(), []
    for steps in zip(*(s.steps() for s in samplers), strict=True):
        assert len({s.num_microbatches for s in steps}) == 1
        counts.add(steps[0].num_microbatches)
        for step in steps:
            for microbatch, scale in zip(step, step.loss_scales(counts=[1] * len(step)), strict=True):
                assert sum(LENGTHS[i] for i in microbatch) <= 2000 or len(microbatch) == 1
                drawn += microbatch if scale else []
    assert len(counts) > 1
    assert sorted(drawn) == list(range(len(LENGTHS)))


def test_more_ranks_than_samples_are_kept_busy_with_samples_that_do_not_count():
    steps = [next(make(r, 4, 3, lengths=[5, 6, 7], max_tokens=100).steps()) for r in range(4)]
    scales = [s.loss_scales(counts=[1])[0] for s in steps]
    assert sorted(scales) == [0, 4, 4, 4]  # one process group member per sampler: no one else's counts are summed
    assert all(len(m) == 1 for s in steps for m in s)


def test_epochs_differ_and_follow_one_another_with_or_without_set_epoch():
    sampler, told = make(), make()
    first = next(iter(sampler))
    epochs = [list(sampler) for _ in range(3)]
    assert first == epochs[0][0], "an epoch that was left early begins anew"
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in (0, 1, 2):
        told.set_epoch(epoch)
        assert list(told) == epochs[epoch]
    told.set_epoch(1)
    assert list(told) == epochs[1]


def test_resuming_by_the_trainers_count_gives_what_would_have_come():
    for ranks_before, ranks_after in ((2, 2), (2, 3)):
        uninterrupted = global_batches(ranks_before, 17)
        samplers = [make(rank, ranks_after, num_microbatches=2) for rank in range(ranks_after)]
        for sampler in samplers:
            sampler.load_state_dict(make(0, ranks_before).state_dict(10))
        steps = zip(*(s.steps(until=17) for s in samplers), strict=True)
        assert [{i for s in found for m in s for i in m} for found in steps] == uninterrupted[10:]


def test_a_step_whose_microbatches_were_not_all_drawn_does_not_shift_the_next():
    sampler = make(num_microbatches=3)
    loader = DataLoader(range(203), batch_sampler=sampler, collate_fn=list)
    for step in sampler.steps(loader):
        assert next(iter(step)) == step.indices[0]


def test_state_of_another_order_is_refused():
    with pytest.raises(ConfigError, match="seed is 1, the checkpoint was made with 0"):
        make(seed=1).load_state_dict(make().state_dict(5))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(6, 70), min_size=2, max_size=4),
    taken=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    window=st.integers(1, 3), slots=st.integers(1, 2),
)  # fmt: skip
def test_a_resume_with_another_global_batch_size_loses_and_repeats_no_sample(sizes, taken, window, slots):
    """Several in a row, within epochs and at their ends; afterwards epochs are whole."""
    state, drawn, step = None, [], 0

    def draw(until: int) -> None:
        for done in sampler.steps(until=until):
            for m, is_filler in zip(done, sampler.planned(done.number).is_filler(0), strict=True):
                drawn.extend([] if is_filler else m)

    for size, num_steps in zip(sizes, [*taken, 0], strict=False):
        sampler = make(size=size, window=window, num_microbatches=slots, ahead=0)
        if state is not None:
            sampler.load_state_dict(state)
        draw(step + num_steps)
        step += num_steps
        assert sampler.state_dict()["step"] == step
        state = sampler.state_dict()
    draw(step + 12)
    for first in range(0, len(drawn) - 203 + 1, 203):
        assert sorted(drawn[first : first + 203]) == list(range(203))


def test_a_window_gathers_similar_samples_and_leaves_no_one_out():
    def spread(sampler) -> float:
        return float(np.mean([np.ptp([LENGTHS[i] for i in step.samples]) for step in map(sampler.planned, range(6))]))

    plain, windowed, pieces = make(), make(window=6), make(window=6, num_microbatches=2)
    assert spread(windowed) < 0.5 * spread(plain)
    assert spread(windowed) < spread(pieces), "each of several microbatches is of a size range of its own"
    assert {i for m in windowed for i in m} == set(range(203))
    assert list(make(window=6)) == list(make(window=6)) != list(windowed), "an epoch of its own order each"
    assert list(make(window=6, num_microbatches=1, ahead=0)) == list(make(window=6))


def test_an_order_is_followed_as_global_batches_on_any_number_of_ranks():
    by_length = np.argsort(LENGTHS).tolist()
    for world, slots in ((1, 1), (3, 2)):
        batches = global_batches(world, 14, order=by_length, num_microbatches=slots)
        assert batches[:7] == batches[7:] == [set(by_length[k : k + 32]) for k in range(0, 203, 32)]
    sampler = make(order=[3, 5, 3, 8], size=2)
    assert list(sampler) == [[3, 5], [3, 8]], "a sample may come twice in an epoch"
    with pytest.raises(ConfigError, match="window rearranges global batches"):
        make(order=by_length, window=2)


def test_planning_ahead_changes_nothing_and_leaves_no_thread():
    before = set(threading.enumerate())
    assert list(make(ahead=0)) == list(make(ahead=3))
    abandoned = iter(make(ahead=3))
    next(abandoned)
    del abandoned
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_a_sampler_travels_to_other_processes():
    sampler = make(num_microbatches=2)
    sampler.resume(3)
    first = list(sampler)
    sampler.resume(3)
    assert list(pickle.loads(pickle.dumps(sampler))) == first


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"num_microbatches": 2, "max_tokens": 5}, "both given"), ({"sync": "steps"}, "unknown sync"),
        ({"rank": 2, "world": 2}, "rank 2 is none of 2"), ({"world": 40}, r"32 sample\(s\) for 40 rank\(s\)"),
        ({"window": 0}, "window is 0"), ({"order": iter([1, 2])}, "list_iterator has no length"),
        ({"order": [1, 203]}, "list draws sample 203, of 203 samples"),
        ({"order": [[1, [2]], [3]]}, "packs several samples"), ({"order": [[1, 2], [3], [4]]}, "batches of 1 to 2"),
        ({"size": 300, "drop_last": True}, "drop_last leaves nothing"),
    ],
)  # fmt: skip
def test_contradictions_are_told_before_the_first_step(given, word):
    with pytest.raises(ConfigError, match=word):
        make(**given)


def test_whoever_would_shard_the_batches_again_is_told():
    from accelerate.data_loader import BatchSamplerShard

    with pytest.raises(ConfigError, match=r"accelerator\.prepare"):
        BatchSamplerShard(make(), num_processes=2, process_index=0)


def test_mixture_weights_draw_a_sample_more_often():
    weights = np.where(np.arange(64) < 32, 1.0, 3.0)
    costs = dataclasses.replace(sample_costs([5] * 64), weights=weights)
    drawn = [i for m in make(size=8, lengths=costs, drop_last=True) for i in m]
    assert sum(i >= 32 for i in drawn) > 2 * sum(i < 32 for i in drawn)


BARE = """
from dflop.sampler import BalancedBatchSampler
lengths = {lengths!r}
for sync in ("step", "microbatch"):
    sampler = BalancedBatchSampler(lengths, 32, rank=1, num_replicas=2, num_microbatches=2, sync=sync)
    print([m for m in sampler])
"""


def test_nothing_but_torch_and_numpy_is_needed_and_plans_are_the_same_without_a_compiler():
    blocked = (
        "numba duckdb cvxpy prefect polars pydantic pyarrow scipy ruamel transformers cyclopts rich submitit av PIL"
    )
    said = run_without(blocked.split(), BARE.format(lengths=LENGTHS))
    here = [list(make(1, 2, num_microbatches=2, sync=sync)) for sync in ("step", "microbatch")]
    assert said.splitlines() == [str(batches) for batches in here]
