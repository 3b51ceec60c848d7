"""The variable-length kernels, and SDPA on each segment alone, against dense attention; values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.models import attention
from tests.models.attention_cases import HEADS, SEGMENTS, WINDOWS, assert_equals_dense


@pytest.mark.parametrize("kernel", ["flash3", "flash", "varlen", "sdpa"])
@given(SEGMENTS.filter(any), HEADS, WINDOWS, st.sampled_from([None, 0.5]), st.sampled_from([32, 64, 128]))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packed_kernels_equal_dense_attention(cuda, kernel, lengths, heads, causal_window, scale, head_dim):
    try:
        attention.resolve(kernel, "cuda", torch.bfloat16)
    except ConfigError as error:
        pytest.skip(error.what)
    assert_equals_dense(
        lengths, heads, causal_window, scale, torch.bfloat16, kernel=kernel, device=cuda, head_dim=head_dim
    )


@pytest.mark.parametrize("kernel", ["flash3", "flash", "varlen", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
def test_long_segments(cuda, kernel, causal):
    try:
        attention.resolve(kernel, "cuda", torch.bfloat16)
    except ConfigError as error:
        pytest.skip(error.what)
    lengths = [1, 7, 128, 0, 300, 64, 64]
    assert_equals_dense(lengths, (4, 2), (causal, None), None, torch.bfloat16, kernel=kernel, device=cuda, head_dim=64)


@pytest.mark.parametrize("kernel", ["flash3", "flash", "varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 40])
def test_queries_whose_first_keys_are_elsewhere(cuda, kernel, window):
    try:
        attention.resolve(kernel, "cuda", torch.bfloat16)
    except ConfigError as error:
        pytest.skip(error.what)
    assert_equals_dense(
        [300, 7, 64], (4, 2), (True, window), None, torch.bfloat16, kernel=kernel, device=cuda, head_dim=64,
        num_elsewhere=200,
    )  # fmt: skip


def test_in_float32_segments_have_their_own_calls(cuda):
    assert attention.resolve("auto", "cuda", torch.float32) == "sdpa"
    assert_equals_dense([3, 3, 0, 5], (4, 2), (True, None), None, torch.float64, device=cuda)
