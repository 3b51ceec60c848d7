"""Samples dealt out by their shares of the caps: for a plan that must be made at once and keep what memory holds.

The sample that takes the largest share of any cap comes first, or of all caps together, and goes where the fullest cap
stays emptiest: LPT on shares. Unlike packing into buckets it knows that the ranks of an encoder share out what a whole
microbatch brings.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dflop.cost.model import Floats
from dflop.schedule.items import Ints
from dflop.schedule.linear import LinearStep


def by_shares(step: LinearStep) -> Iterator[tuple[Ints, Ints]]:
    """(slot, rank) of every sample, for both orders."""
    cap_llm = max(1, min(step.cap_tokens, step.cap_in_flight_tokens // step.window))
    bound = np.flatnonzero(step.cap_media_tokens)
    share_llm = step.tokens / cap_llm
    share_media: Floats = step.media_tokens[bound] / step.cap_media_tokens[bound, None]
    shares = np.vstack([share_llm, *share_media])
    for size in (shares.max(axis=0), shares.sum(axis=0)):
        yield _dealt_out(step, np.argsort(-size, kind="stable"), share_llm, share_media)


def _dealt_out(step: LinearStep, order: Ints, share_llm: Floats, share_media: Floats) -> tuple[Ints, Ints]:
    num_media_ranks = step.num_ranks if step.is_inline else 1
    llm = np.zeros((step.num_slots, step.num_ranks))
    media = np.zeros((len(share_media), step.num_slots, num_media_ranks))
    slot, rank = np.zeros_like(step.tokens), np.zeros_like(step.tokens)
    for i in order:
        text, more = llm + share_llm[i], share_media[:, i, None, None]
        fullest = np.maximum(text, (media + more).max(axis=0, initial=0.0))
        # Among cells that are full alike, the one with the fewest tokens of the LLM.
        cell = np.lexsort((text.ravel(), fullest.ravel()))[0]
        slot[i], rank[i] = divmod(int(cell), step.num_ranks)
        llm[slot[i], rank[i]] += share_llm[i]
        media[:, slot[i], rank[i] % num_media_ranks] += share_media[:, i]
    return slot, rank
