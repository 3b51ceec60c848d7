"""What FP8 is charged: products by the data sheet, every operand's cast by its bytes, nothing of what stays."""

import dataclasses

import pytest

from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.curve import evaluate
from dflop.cost.devices import A100, H100
from dflop.cost.float8 import RECIPES, Passes, float8_linears, float8_seconds
from dflop.cost.roofline import COMPILED, EAGER
from dflop.errors import ConfigError
from dflop.records import CostTable, LayerKind, ModuleSpec
from tests.cost.test_analytic import QWEN_7B, SIGLIP

TENSORWISE = RECIPES["tensorwise"]
((KIND, _),) = QWEN_7B.layers
GATED = dataclasses.replace(KIND, is_gated_mlp=True)
ENOUGH = 32_768
"""Tokens, for any layer to take longer than its launches."""


def of(kind: LayerKind) -> ModuleSpec:
    return dataclasses.replace(QWEN_7B, layers=((kind, 28),))


def table(fp8: str, *, program=COMPILED, is_frozen: bool = False, kind: LayerKind = GATED) -> CostTable:
    frozen = ["llm"] if is_frozen else []
    tables = analytic_cost_tables([of(kind)], H100, profile_key="p", frozen=frozen, program=program, fp8=fp8)
    return next(t for t in tables if t.tp == 1 and not t.recompute)


def seconds(found: CostTable, num_tokens: int) -> float:
    return sum(float(evaluate(t, (1, num_tokens, 0), 1, edge=False)) for t in (found.forward_s, found.backward_s))


def test_linears_are_those_of_a_layers_matrices():
    """Listed one by one: (in, out) of q, k, v, o, gate, up, down."""
    h, kv, wide = 3584, 512, 18_944
    matrices = [(h, h), (h, kv), (h, kv), (h, h), (h, wide), (h, wide), (wide, h)]
    found = float8_linears(of(GATED), 1)
    assert found.num_params == sum(a * b for a, b in matrices) == pytest.approx(KIND.num_params, rel=1e-3)
    assert found.num_out == sum(b for _, b in matrices)
    assert found.num_in == 2 * h + h + wide, "query, key and value share what goes in, and so do gate and up"
    halves = float8_linears(of(GATED), 2)
    assert halves.num_params == found.num_params / 2
    assert halves.num_in - found.num_in / 2 == h, "what is gathered is whole"
    assert halves.num_out - found.num_out / 2 == h, "what is to be summed is whole"


def test_experts_and_layers_without_attention_multiply_as_before():
    experts = dataclasses.replace(GATED, num_active_params=10**8, num_experts=8)
    attention = 2 * 3584 * (3584 + 512)
    assert float8_linears(of(experts), 1).num_params == attention
    gone = dataclasses.replace(experts, num_heads=0)
    assert float8_linears(of(gone), 1) == float8_linears(of(dataclasses.replace(gone, mlp_width=0)), 4)
    assert seconds(table("tensorwise", kind=gone), ENOUGH) == seconds(table("off", kind=gone), ENOUGH)


@pytest.mark.parametrize(("program", "cast_bytes"), [(EAGER, 33), (COMPILED, 5)], ids=["eager", "compiled"])
def test_a_pass_halves_its_products_and_casts_both_operands_of_each(program, cast_bytes):
    found, rate = float8_linears(of(GATED), 1), H100.peak_bf16_flops * H100.matmul_frac
    token_s, weight_s = float8_seconds(of(GATED), 1, H100, program, TENSORWISE, Passes(1, 1, 1))
    casts = 2 * (found.num_in + found.num_out)
    assert token_s == pytest.approx(-3 * found.num_params / rate + cast_bytes * casts / H100.memory_bytes_per_s)
    assert weight_s == pytest.approx(2 * found.num_params * cast_bytes / H100.memory_bytes_per_s)


def test_a_compiled_layer_gains_by_its_tokens_and_an_eager_one_loses():
    gains = [seconds(table("off"), n) / seconds(table("tensorwise"), n) for n in (1024, 4096, ENOUGH)]
    assert gains == sorted(gains)
    assert gains[0] < 1 < gains[-1] < 1.5
    assert seconds(table("rowwise"), ENOUGH) > seconds(table("tensorwise"), ENOUGH)
    eager, in_float8 = (seconds(table(fp8, program=EAGER), ENOUGH) for fp8 in ("off", "tensorwise"))
    assert in_float8 > eager


def test_frozen_weights_save_two_thirds_of_what_trained_ones_do_of_products():
    trained, frozen = Passes(1, 1, 1), Passes(1, 1)
    without_casts = dataclasses.replace(COMPILED, cast_bytes=0.0)
    saved = [float8_seconds(QWEN_7B, 1, H100, without_casts, TENSORWISE, passes)[0] for passes in (trained, frozen)]
    assert saved[1] == pytest.approx(2 / 3 * saved[0])
    assert seconds(table("tensorwise", is_frozen=True), ENOUGH) < seconds(table("off", is_frozen=True), ENOUGH)


def test_tables_say_so_and_those_of_encoders_stay():
    specs = [SIGLIP, QWEN_7B]
    plain, in_float8 = (analytic_cost_tables(specs, H100, profile_key="", fp8=fp8) for fp8 in ("off", "rowwise"))
    assert {(t.module, t.fp8) for t in in_float8} == {("vision", "off"), ("llm", "rowwise")}
    assert [t for t in in_float8 if t.module == "vision"] == [t for t in plain if t.module == "vision"]
    assert not {t.table_id for t in in_float8 if t.module == "llm"} & {t.table_id for t in plain}
    kept = [{t.activation_bytes for t in tables if t.module == "llm"} for tables in (plain, in_float8)]
    assert kept[0] == kept[1], "what is kept is in bfloat16"


def test_a_device_without_fp8_is_refused():
    with pytest.raises(ConfigError, match="A100-80G SXM has no FP8 matmuls") as refused:
        analytic_cost_tables([QWEN_7B], A100, profile_key="", fp8="tensorwise")
    assert "h100" in refused.value.hint
