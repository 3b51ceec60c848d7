import pytest

from dflop.cost.devices import A100, H100, H200
from dflop.cost.roofline import COMPILED, EAGER, Work, backward_work, layer_work
from tests.cost.test_analytic import QWEN_7B, SIGLIP


def test_a_token_takes_two_flops_a_weight_and_a_causal_key_half_of_four_times_the_query_width():
    llm, encoder = layer_work(QWEN_7B), layer_work(SIGLIP)
    assert llm.matmul_flops == 2 * QWEN_7B.kinds[0].num_params
    assert llm.attention_flops == 2 * 28 * 128
    assert encoder.attention_flops == 4 * 16 * 72
    assert encoder.hidden_bytes == 2 * 1152


@pytest.mark.parametrize("spec", [QWEN_7B, SIGLIP], ids=["llm", "vision"])
def test_ranks_share_a_layer(spec):
    assert layer_work(spec, 4).times(4, 4, 4) == layer_work(spec, 1)


def test_a_backward_pass_knows_frozen_weights_and_what_runs_again():
    once = Work(1.0, 1.0, 1.0)
    assert backward_work(once) == Work(2.0, 2.5, 2.0)
    assert backward_work(once, is_frozen=True) == Work(1.0, 2.5, 2.0)
    assert backward_work(once, recomputed_frac=1.0) == Work(3.0, 3.5, 3.0)


def test_seconds_are_those_of_the_sheet():
    work = Work(1e9, 1e6, 1e3)
    for program in (EAGER, COMPILED):
        expected = 1e9 / (A100.peak_bf16_flops * A100.matmul_frac) + program.moves * 1e3 / A100.memory_bytes_per_s
        assert work.seconds_per_token(A100, program) == pytest.approx(expected)
    assert work.seconds_per_token(A100) == work.seconds_per_token(A100, EAGER) > work.seconds_per_token(A100, COMPILED)
    assert work.seconds_per_sq_token(H100) == pytest.approx(1e6 / (989.5e12 * H100.attention_frac))
    assert work.seconds_per_token(H200) < work.seconds_per_token(H100) < work.seconds_per_token(A100)
