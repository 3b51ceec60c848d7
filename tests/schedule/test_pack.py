import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.pack import token_cap, token_lpt


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 12))
def test_token_cap_allows_lpt_on_tokens_and_a_quarter_above_the_average(lengths, buckets):
    tokens = np.array(lengths)
    largest = np.bincount(token_lpt(tokens, buckets), tokens, buckets).max()
    assert token_cap(tokens, buckets) == max(np.ceil(1.25 * tokens.sum() / buckets), largest)


def test_token_lpt_gives_the_next_longest_to_the_emptiest():
    assert token_lpt(np.array([5, 1, 4, 3, 2]), 2).tolist() == [0, 0, 1, 1, 0]
    assert token_lpt(np.zeros(3, dtype=np.int64), 3).tolist() == [0, 0, 0]
