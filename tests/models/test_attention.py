from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.build import cut_stage
from dflop.records import LLM
from tests.models.attention_cases import HEADS, SEGMENTS, TOLERANCE, WINDOWS, assert_equals_dense, dense, tensors
from tests.train.synthetic import HIDDEN_SIZE, family, tiny_model

LENGTHS = [0, 3, 3, 0, 1, 6, 0]


@given(SEGMENTS, HEADS, WINDOWS, st.sampled_from([None, 0.5]), st.sampled_from(list(TOLERANCE)))
def test_equals_dense_masked_attention_with_its_gradients(lengths, heads, causal_window, scale, dtype):
    assert_equals_dense(lengths, heads, causal_window, scale, dtype)


@given(SEGMENTS.filter(lambda lengths: lengths[0] > 1), HEADS, WINDOWS.filter(lambda kind: kind[0]), st.data())
def test_queries_whose_first_keys_are_elsewhere_are_the_last_of_their_segment(lengths, heads, causal_window, data):
    num_elsewhere = data.draw(st.integers(1, lengths[0] - 1))
    assert_equals_dense(lengths, heads, causal_window, None, torch.float64, num_elsewhere=num_elsewhere)


def test_neighbours_of_one_length_share_a_call(monkeypatch):
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F, "scaled_dot_product_attention", lambda q, *a, **k: (calls.append(q.shape), sdpa(q, *a, **k))[1]
    )
    query, key, value, cu_seqlens = tensors([4, 4, 4, 0, 4, 2, 4], (2, 1))
    attention.packed_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=cu_seqlens)
    assert [tuple(shape) for shape in calls] == [(4, 2, 4, 8), (1, 2, 2, 8), (1, 2, 4, 8)]


def test_the_layer_says_whether_it_is_causal_unless_the_call_does():
    query, key, value, cu_seqlens = tensors([5], (2, 2))
    layer = torch.nn.Module()
    layer.is_causal = False
    free, causal = (
        attention.packed_attention(layer, query, key, value, None, cu_seq_lens_q=cu_seqlens, is_causal=flag)[0]
        for flag in (None, True)
    )
    torch.testing.assert_close(free, dense(query, key, value, cu_seqlens, causal=False, scale=8**-0.5))
    torch.testing.assert_close(causal, dense(query, key, value, cu_seqlens, causal=True, scale=8**-0.5))


def test_a_mask_and_a_window_that_looks_both_ways_are_refused():
    query, key, value, _ = tensors([4], (2, 2))
    with pytest.raises(ValueError, match="attention_mask"):
        attention.packed_attention(torch.nn.Module(), query, key, value, torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match="causal layers only"):
        attention.packed_attention(torch.nn.Module(), query, key, value, None, is_causal=False, sliding_window=2)


def fake_kernel(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window):
    """What both variable-length kernels promise: `[tokens, heads, head_dim]` in and out."""
    assert all(x.is_contiguous() for x in (query, key, value))
    assert max_q == int((cu_q[1:] - cu_q[:-1]).max())
    assert max_k == int((cu_k[1:] - cu_k[:-1]).max())
    num_elsewhere = len(key) - len(query)
    assert torch.equal(cu_q, (cu_k - num_elsewhere).clamp(min=0))
    query = torch.cat([query.new_zeros(num_elsewhere, *query.shape[1:]), query])
    heads_first = (x.transpose(0, 1)[None] for x in (query, key, value))
    before, behind = window
    keys = None if before < 0 else before + 1
    return dense(*heads_first, cu_k, causal=behind == 0, scale=scale, window=keys)[0, num_elsewhere:].contiguous()


@pytest.fixture
def kernel(request, monkeypatch):
    """The glue around one of the CUDA kernels, the kernel itself replaced by dense attention."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    if request.param.startswith("flash"):
        name = "flash_attn_interface" if request.param == "flash3" else "flash_attn"
        module = types.ModuleType(name)

        def flash(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size, **rest):
            assert rest.pop("deterministic") == torch.are_deterministic_algorithms_enabled()
            assert rest == ({} if request.param == "flash3" else {"dropout_p": 0})
            assert causal == (window_size[1] == 0)
            return fake_kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window=window_size)

        module.flash_attn_varlen_func = flash
        monkeypatch.setitem(sys.modules, name, module)
    else:
        from torch.nn.attention import varlen

        def older(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
            assert q.shape[1:] == k.shape[1:], "it knows no grouped heads"
            return fake_kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=q.shape[-1] ** -0.5, window=window_size)

        def newer(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
            assert enable_gqa == (q.shape[1] != k.shape[1])
            return fake_kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window=window_size)

        monkeypatch.setitem(sys.modules, "flash_attn", None)
        monkeypatch.setattr(varlen, "varlen_attn", older if request.param == "older varlen" else newer)
    attention._missing.cache_clear()
    yield request.param.removeprefix("older ")
    attention._missing.cache_clear()


@pytest.mark.parametrize("kernel", ["flash3", "flash", "varlen", "older varlen"], indirect=True)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("causal_window", [(True, None), (False, None), (True, 2)])
def test_kernels_are_called_with_the_layout_they_want(kernel, heads, causal_window):
    assert_equals_dense(LENGTHS, heads, causal_window, 0.3, torch.float64, kernel=kernel)
    if causal_window[0]:
        shared = [5, *LENGTHS]
        assert_equals_dense(shared, heads, causal_window, 0.3, torch.float64, kernel=kernel, num_elsewhere=3)


@pytest.mark.parametrize("kernel", ["flash3", "flash"], indirect=True)
def test_kernels_are_told_to_be_deterministic_where_torch_is(kernel):
    torch.use_deterministic_algorithms(True)
    try:
        assert_equals_dense(LENGTHS, (2, 2), (True, None), 0.3, torch.float64, kernel=kernel)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", ["varlen", "older varlen"], indirect=True)
def test_a_kernels_signature_is_read_once_not_in_every_layer(kernel, monkeypatch):
    read, seen = inspect.signature, []
    monkeypatch.setattr(attention.inspect, "signature", lambda function: seen.append(function) or read(function))
    for _ in range(3):
        assert_equals_dense(LENGTHS, (2, 2), (True, None), 0.3, torch.float64, kernel=kernel)
    assert len(seen) == 1


@pytest.mark.parametrize("kernel", ["flash3", "varlen"], indirect=True)
def test_dropout_is_refused_where_the_kernel_has_none(kernel):
    query, key, value, cu_seqlens = tensors([3], (2, 2))
    with pytest.raises(ConfigError, match=r"no dropout \(attention_dropout is 0\.1\)"):
        attention.packed_attention(
            torch.nn.Module(), query, key, value, None, dropout=0.1, cu_seq_lens_q=cu_seqlens, kernel=kernel
        )


@pytest.mark.parametrize("kernel", ["flash3", "flash", "varlen"], indirect=True)
def test_the_best_kernel_that_can_run_is_chosen(kernel):
    assert attention.resolve("auto", "cuda", torch.bfloat16) == kernel
    assert attention.resolve(kernel, "cuda", torch.bfloat16) == kernel
    assert attention.resolve("sdpa", "cuda", torch.bfloat16) == "sdpa"
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.bfloat16)):
        assert attention.resolve("auto", device, dtype) == "sdpa"


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "message"),
    [
        ("flash", "cpu", torch.bfloat16, "`flash` runs on CUDA in bfloat16, not on cpu in bfloat16"),
        ("varlen", "cuda", torch.float32, "`varlen` runs on CUDA in bfloat16, not on cuda in float32"),
        ("flash", "cuda", torch.bfloat16, "`flash` cannot be imported: .*flash_attn"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(monkeypatch, kernel, device, dtype, message):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    attention._missing.cache_clear()
    with pytest.raises(ConfigError, match=message) as caught:
        attention.resolve(kernel, device, dtype)
    attention._missing.cache_clear()
    assert caught.value.where == "model.attention"
    assert "`auto`" in caught.value.hint


@pytest.mark.parametrize("kernel", ["auto", "flash3", "flash", "varlen", "sdpa"])
def test_layers_of_a_model_use_the_kernel_they_are_told(monkeypatch, kernel):
    stage = cut_stage(tiny_model(), family(), LLM, (0, 4))
    attention.use(stage, kernel)
    used = []
    monkeypatch.setattr(attention, "resolve", lambda kernel, *_: used.append(kernel) or "sdpa")
    monkeypatch.setattr(
        attention, "VARLEN_KERNELS",
        {k: lambda q, k, v, bounds, scale, drop, window, name=k: used.append(name) or q
         for k in ("flash3", "flash", "varlen")},
    )  # fmt: skip
    stage(torch.zeros(4, HIDDEN_SIZE), torch.zeros(3, 4, dtype=torch.long), torch.tensor([0, 4], dtype=torch.int32))
    assert set(used) == ({kernel} if kernel != "sdpa" else set())
