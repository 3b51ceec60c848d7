from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.tokens import EncodedSample
from dflop.errors import TrainError
from dflop.models.build import IGNORE_LABEL, cut_stage
from dflop.parallel.topology import seats
from dflop.records import LLM
from dflop.train.feed import Feed
from dflop.train.prefetch import MediaError
from tests.train.synthetic import (
    SyntheticSource,
    family,
    make_inline_plan,
    make_plan,
    make_shapes,
    make_step_plan,
    tiny_model,
)

PAD_IDS = (1, 2, 3)


@cache
def llm_stage():
    return cut_stage(tiny_model(), family(), LLM, (0, 1))


def prepare_all(plan, step_plan, source):
    """What every rank prepares, by rank."""
    return {
        seat.rank: Feed(source, family(), plan, seat, {LLM: llm_stage()} if seat.module == LLM else {}).prepare(
            step_plan
        )
        for seat in seats(plan)
    }


def setup(num_samples=8, seed=2, layout=None, num_microbatches=2):
    layout = layout or {"vision": (1, 1), "audio": (1, 1), LLM: (1, 1)}
    plan = make_plan(layout, num_microbatches=num_microbatches)
    shapes = make_shapes(num_samples, seed=seed)
    return plan, shapes, make_step_plan(plan, shapes, step=seed)


@settings(max_examples=25)
@given(
    st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.just(1), st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4)),
    st.integers(1, 3),
    st.integers(0, 10_000),
)
def test_both_ends_of_every_message_agree_on_every_row(vision, audio, llm, num_microbatches, seed):
    """Grids are (pp, dp, tp); degrees of tensor parallelism need not divide."""
    layout = {"vision": vision, "audio": audio, LLM: llm}
    plan, shapes, step_plan = setup(8, seed, layout, num_microbatches)
    prepared = prepare_all(plan, step_plan, SyntheticSource(shapes))
    for k in range(num_microbatches):
        outbox, arrived, awaited, returned = {}, [], [], []
        for seat in seats(plan):
            given_, work = prepared[seat.rank].microbatches[k], step_plan.of(seat.module)
            if seat.module == LLM or given_ is None:
                continue
            # A row is tagged with the media item and the row of that item it is.
            tags = [
                (work.item_sample[i], work.item_rank_in_sample[i], r)
                for i in work.owner[k][seat.dp_rank]
                for r in range(work.item_rows[i])
            ]
            for transfer in given_.encoders[seat.module].transfers:
                awaited.append((transfer.peers.takes_from, seat.rank))
                for peer in transfer.peers.gives_to:
                    assert (seat.rank, peer) not in outbox, "two messages to one peer share a tag"
                    outbox[seat.rank, peer] = [tags[i] for i in transfer.rows.tolist()]
        for seat in seats(plan):
            given_ = prepared[seat.rank].microbatches[k]
            if seat.module != LLM or seat.stage > 0 or given_ is None:
                continue
            slots = placeholder_slots(step_plan, shapes, k, seat.dp_rank, given_.llm)
            for transfer in given_.llm.transfers:
                tags = outbox.pop((transfer.peers.takes_from, seat.rank))
                assert [slots[p] for p in transfer.rows.tolist()] == tags
                arrived += tags
                returned += [(seat.rank, peer) for peer in transfer.peers.gives_to]
            assert sorted(slots.values()) == sorted(arrived), "a placeholder stays empty"
            arrived = []
        assert not outbox, "a message nobody receives"
        assert sorted(awaited) == sorted(returned), "gradients go back another way"


def placeholder_slots(step_plan, shapes, k, dp_rank, given_):
    """Position in the packed tokens -> (sample, item, row) that belongs there, found from the token ids alone."""
    llm = step_plan.of(LLM)
    where = iter(torch.isin(given_.input_ids, torch.tensor(PAD_IDS)).nonzero().flatten().tolist())
    slots = {}
    for sample in (llm.item_sample[i] for i in llm.owner[k][dp_rank]):
        for number, item in enumerate(shapes[sample].items):
            slots |= {next(where): (sample, number, row) for row in range(item.num_rows)}
    assert next(where, None) is None
    return slots


class Edited(SyntheticSource):
    """One sample, or the first item of it, is other than it was when it was profiled."""

    def __init__(self, shapes, sample_index, change):
        super().__init__(shapes)
        self._sample_index, self._change = sample_index, change

    def tokens(self, sample_index: int) -> EncodedSample:
        sample = super().tokens(sample_index)
        if sample_index != self._sample_index or callable(self._change):
            return sample
        return dataclasses.replace(sample, **{k: f(getattr(sample, k)) for k, f in self._change.items()})

    def array(self, sample_index: int, item: int) -> np.ndarray:
        array = super().array(sample_index, item)
        return self._change(array) if (sample_index, item) == (self._sample_index, 0) else array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input_ids": lambda x: np.append(x, 9), "labels": lambda x: np.append(x, 9)},
            "has 56 tokens but was profiled with 55",
        ),
        ({"labels": lambda x: np.full_like(x, IGNORE_LABEL)}, "has 0 supervised tokens but was profiled with 1"),
    ],
    ids=["longer", "no loss"],
)
def test_a_sample_that_changed_since_the_profile_is_named(change, message):
    plan, shapes, step_plan = setup()
    with pytest.raises(TrainError, match=f"sample `s4` {message}") as caught:
        prepare_all(plan, step_plan, Edited(shapes, 4, change))
    assert caught.value.where == "annotation row 4"
    assert "profile again" in caught.value.hint


def undecodable(array):
    raise MediaError("truncated after 12 bytes")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (undecodable, "truncated after 12 bytes"),
        (lambda a: a[:-4], "decodes to an array of shape ("),
        (lambda a: np.concatenate([a, a]), "decodes to an array of shape ("),
        (lambda a: a.reshape(-1), "decodes to an array of shape ("),
    ],
)
def test_media_that_cannot_be_used_become_zeros_and_are_reported(change, reason):
    plan, shapes, step_plan = setup()
    assert shapes[0].items[0].module == "vision"
    healthy = prepare_all(plan, step_plan, SyntheticSource(shapes))
    got = prepare_all(plan, step_plan, Edited(shapes, 0, change))
    assert [r for r, p in got.items() if p.bad_samples] == [0]
    ((position, (path, said)),) = got[0].bad_samples.items()
    assert (position, path) == (0, "image.bin")
    assert said.startswith(reason)
    num_zeroed = 0
    for mine, reference in zip(got[0].microbatches, healthy[0].microbatches, strict=True):
        if mine is None:
            continue
        mine, reference = mine.encoders["vision"], reference.encoders["vision"]
        assert torch.equal(mine.sizes, reference.sizes)
        changed = (mine.data != reference.data).any(dim=1)
        assert torch.equal(mine.data[changed], torch.zeros_like(mine.data[changed]))
        num_zeroed += int(changed.sum())
    assert num_zeroed == shapes[0].items[0].num_tokens


class Counting(SyntheticSource):
    """Notes which media are read; none can be decoded if `is_broken`."""

    def __init__(self, shapes, *, is_broken: bool) -> None:
        super().__init__(shapes)
        self.read: list[tuple[int, int]] = []
        self._is_broken = is_broken

    def array(self, sample_index: int, item: int) -> np.ndarray:
        self.read.append((sample_index, item))
        return undecodable(None) if self._is_broken else super().array(sample_index, item)


@pytest.mark.parametrize("is_broken", [False, True])
def test_media_of_which_a_rank_encodes_several_ranges_are_taken_once(is_broken):
    plan = make_inline_plan([{"vision": 2, LLM: 4}], dp=1, cp=2, num_microbatches=1)
    shapes = make_shapes(6, seed=11, kinds=("video",))
    step_plan, num_ranges = make_step_plan(plan, shapes, step=0), []
    for seat in seats(plan):
        source = Counting(shapes, is_broken=is_broken)
        feed = Feed(source, family(), plan, seat, {LLM: llm_stage()})
        num_ranges.append(len(feed._share(step_plan, "vision", 0).ranges))
        prepared = feed.prepare(step_plan)
        assert len(set(source.read)) == len(source.read)
        assert num_ranges[-1] > len(source.read) > 0
        assert len(prepared.bad_samples) == is_broken * len({sample for sample, _ in source.read})
