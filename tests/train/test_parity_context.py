"""Context-parallel ranks share samples: losses and every gradient equal a single-process Hugging Face run.

Batches hold a sample that is longer than all others together and one of two tokens, which is a microbatch for itself:
ranks have nothing of it. A few layouts run in `make test`, the others in a lane.
"""

from __future__ import annotations

from functools import cache

import pytest

from dflop.simulate.pieces import dealt, pieces
from tests.train.layouts import NUM_MICROBATCHES
from tests.train.layouts_context import GRID, HEART, OTHERS
from tests.train.parity import assert_equal_steps, reference, run_trial
from tests.train.synthetic import SyntheticSource
from tests.train.test_parity import in_lane

cached_reference = cache(reference)


@pytest.mark.parametrize("name", [*HEART, *in_lane([*GRID, *OTHERS])])
def test_gradients_equal_hugging_face(name, tmp_path):
    layout = (GRID | OTHERS | HEART)[name]
    expected = cached_reference(layout.subject, frozen=layout.frozen, bad_positions=layout.bad)
    assert_equal_steps(run_trial(layout.trial, tmp_path), expected)


def test_trials_meet_what_is_hard():
    """A sample on all ranks, ranks without tokens or tiles, items and rows on two ranks, a piece without loss."""
    layout, found = HEART["cp4, half recomputed, half on the host"], set()
    for batch, step_plan in zip(layout.subject.batches, layout.trial.step_plans, strict=True):
        source = SyntheticSource(batch)
        for k in range(NUM_MICROBATCHES):
            of_ranks = pieces(layout.plan, step_plan, k, 0)
            if not any(of_ranks):
                found.add("nothing")
                continue
            found |= {"rank without tokens" for of in of_ranks if not of}
            for sample in {p.sample for of in of_ranks for p in of}:
                own = [p for of in of_ranks for p in of if p.sample == sample]
                tokens = source.tokens(batch[sample].sample_index)
                found |= {"whole group" for _ in own[3:]}
                found |= {"no loss" for p in own if (tokens.labels[p.first + 1 : p.end + 1] == -100).all()}
                for media in tokens.media_positions:
                    if sum(bool(((p.first <= media) & (media < p.end)).any()) for p in own) > 1:
                        found.add("media on two ranks")
            work = step_plan.of("vision")
            media = lambda i, work=work, batch=batch: batch[work.item_sample[i]].items[work.item_rank_in_sample[i]]  # noqa: E731
            ranges = dealt(layout.plan, step_plan, "vision", k, 0, media)
            found |= {"rank without tiles"} if any(ranges) and not all(ranges) else set()
            found |= {"item on two ranks" for of in ranges for r in of if r.first}
    assert found == {
        "nothing", "rank without tokens", "whole group", "no loss", "media on two ranks", "rank without tiles",
        "item on two ranks",
    }  # fmt: skip
