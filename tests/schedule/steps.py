"""Random linear steps whose seconds are sums of eighths, so that orders of summation do not matter."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from dflop.schedule.linear import LinearStep

EIGHTHS = st.integers(1, 40).map(lambda n: n / 8)


@st.composite
def linear_steps(draw: st.DrawFn) -> LinearStep:
    num_encoders, num_slots, num_ranks = draw(st.integers(0, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    pp = draw(st.integers(1, 3))
    num_samples = draw(st.integers(1, 10))

    def row(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=num_samples, max_size=num_samples))

    num_items = [row(st.integers(0, 2)) for _ in range(num_encoders)]
    slot_s = [[n * s for n, s in zip(items, row(EIGHTHS), strict=True)] for items in num_items]
    tokens = np.array(row(st.integers(1, 50)), dtype=np.int64)
    num_stages = num_encoders + pp
    return LinearStep(
        num_slots=num_slots,
        num_ranks=num_ranks,
        chain_s=np.array([row(EIGHTHS) for _ in range(draw(st.integers(1, 2)))]),
        slot_s=np.array(slot_s, dtype=float).reshape(-1, num_samples),
        tokens=tokens,
        num_items=np.array(num_items, dtype=np.int64).reshape(-1, num_samples),
        pipe_pp=np.array([1] * num_encoders + [pp], dtype=np.int64),
        stage_kind=np.array([*range(num_encoders), *[0] * pp], dtype=np.int64),
        fixed_s=np.array(draw(st.lists(EIGHTHS, min_size=num_stages, max_size=num_stages))),
        forward_frac=np.full(num_stages, 0.25),
        num_after=np.array([pp] * num_encoders + list(range(pp - 1, -1, -1)), dtype=np.int64),
        cap_tokens=draw(st.integers(int(tokens.max()), int(tokens.sum()))),
    )
