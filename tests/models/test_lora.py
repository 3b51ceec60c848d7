"""Which Linears get adapters, which targets are refused, and what adapters add."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dflop.config import LoraConfig
from dflop.errors import ConfigError
from dflop.models.float8 import use_float8
from dflop.models.fused import linear_of_activation
from dflop.models.lora import WithAdapters, add_adapters, merged
from dflop.models.low_rank import INPUT_SHARE, adapt, dropout_of
from dflop.models.random_weights import RandomWeights
from dflop.models.weights import build_empty
from dflop.records import LLM
from tests.models.generic.small import Small
from tests.train import synthetic
from tests.train.adapted import fill
from tests.train.parity import module_of

A, B = (f"model.language_model.layers.0.self_attn.q_proj.lora_{which}.weight" for which in "AB")


def empty():
    return build_empty(synthetic.family(), synthetic.hf_config(tied=False), torch.float32)


def adapted(**targets):
    model = empty()
    return model, add_adapters(model, synthetic.family(), LoraConfig(targets=targets, rank=2, alpha=6))


@pytest.mark.parametrize(
    ("targets", "last"),
    [
        ({LLM: ("q_proj", "v_proj")}, {"q_proj", "v_proj"}),
        ({LLM: ("*.mlp.*",)}, {"gate_proj", "up_proj", "down_proj"}),
        ({LLM: ("all-linear",)}, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ({"audio": ("all-linear",)}, {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "proj"}),
    ],
)
def test_targets_name_linears_of_one_module_and_all_else_of_it_is_frozen(targets, last):
    model, adapters = adapted(**targets)
    assert {name.rpartition(".")[2] for name in adapters.linears} == last
    (module,), family = targets, synthetic.family()
    assert {module_of(name, family) for name in adapters.shapes} == {module}
    stood_still = {name for name, p in empty().named_parameters() if not p.requires_grad}  # a table of positions
    others = {n for n, _ in empty().named_parameters() if module_of(n, family) == module}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == others | stood_still
    assert adapters.base == others


@pytest.mark.parametrize(
    ("targets", "what", "hint"),
    [
        ({LLM: ("query",)}, "`query` names no Linear of `llm`", "all-linear, q_proj, k_proj"),
        ({LLM: ("embed_tokens",)}, r"`embed_tokens` names `.*embed_tokens.weight` \[", "or a pattern such as"),
        ({LLM: ("*.layers.0.*",)}, "layers 1, 2, 3 of `llm` would have no adapter", "q_proj"),
        ({"visoin": ("q_proj",)}, "unknown module `visoin`", "vision"),
    ],
)
def test_a_target_that_can_have_no_adapter_is_refused_with_those_that_can(targets, what, hint):
    with pytest.raises(ConfigError, match=what) as refused:
        adapted(**targets)
    assert hint in refused.value.hint
    assert "train.lora.targets" in refused.value.where


def test_a_rank_above_the_side_of_a_matrix_is_refused_with_the_largest_that_would_do():
    with pytest.raises(ConfigError, match=r"rank 9999 is above .*q_proj` \[") as refused:
        add_adapters(empty(), synthetic.family(), LoraConfig(targets={LLM: ("q_proj",)}, rank=9999))
    assert refused.value.where == "train.lora.rank"
    most = int(refused.value.hint.split()[2].rstrip(","))
    for rank, is_refused in ((most, False), (most + 1, True)):
        with pytest.raises(ConfigError) if is_refused else nullcontext():
            add_adapters(empty(), synthetic.family(), LoraConfig(targets={LLM: ("q_proj",)}, rank=rank))


def test_layers_that_lack_a_target_are_told_with_those_that_they_have():
    small = Small("qwen3_5")  # three layers with a state along the tokens, then one with attention
    with pytest.raises(ConfigError, match="layers 0, 1, 2 of `llm` would have no adapter") as refused:
        add_adapters(small.build(), small.family, LoraConfig(targets={LLM: ("q_proj",)}, rank=2))
    assert refused.value.hint == "add a target of these layers: gate_proj, up_proj, down_proj"


def test_experts_and_their_routers_have_no_adapters():
    small = Small("qwen3_vl_moe")
    config = LoraConfig(targets={LLM: ("all-linear",)})
    adapters = add_adapters(small.build(), small.family, config)
    assert {name.rpartition(".")[2] for name in adapters.linears} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match=r"`experts` names `.*experts\..*` \[.*only Linears"):
        add_adapters(small.build(), small.family, LoraConfig(targets={LLM: ("experts",)}))


def test_a_model_begins_as_its_base_and_draws_depend_on_the_name_alone():
    model, adapters = adapted(llm=("all-linear",))
    first = WithAdapters(RandomWeights(empty(), 0), adapters, 5, torch.float32)
    whole = first.read(A)
    assert whole.shape == adapters.shapes[A]
    assert torch.equal(first.read(A, 1, [(3, 5), (0, 1)]), torch.cat([whole[:, 3:5], whole[:, :1]], 1))
    bound = whole.shape[1] ** -0.5
    assert bound / 2 < whole.abs().max() <= bound
    assert not first.read(B).any()
    assert not torch.equal(whole, first.read(A.replace("layers.0", "layers.1")))
    weights = {name: first.read(name) for name, _ in model.named_parameters()}
    base = {name: first.read(name) for name, _ in empty().named_parameters()}
    made = merged(weights, adapters)
    assert made.keys() == base.keys()
    assert all(torch.equal(made[name], base[name]) for name in base)


def test_merged_weights_make_the_logits_that_adapters_make():
    plain = synthetic.tiny_model()
    model = synthetic.tiny_model()
    adapters = add_adapters(model, synthetic.family(), LoraConfig(targets={LLM: ("all-linear",)}, rank=2, alpha=6))
    fill(model, adapters)
    given = {"input_ids": torch.arange(5, 25)[None]}
    before = plain(**given).logits
    plain.load_state_dict(merged(dict(model.named_parameters()), adapters), strict=False)
    after = plain(**given).logits
    assert not torch.allclose(before, after, rtol=1e-2)
    torch.testing.assert_close(model(**given).logits, after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_of_activation", [False, True])
def test_dropout_is_on_what_the_adapter_is_given_and_its_gradients_are_those_of_the_same_mask(is_of_activation):
    torch.manual_seed(0)
    given, linear = torch.randn(50, 32, requires_grad=True), nn.Linear(32, 16)
    linear.requires_grad_(False)
    adapt(linear, 4, 0.5, 0.25)
    a, b = linear.lora_A.weight, linear.lora_B.weight

    def run():
        return linear_of_activation(linear, torch.sigmoid, given) if is_of_activation else linear(given)

    torch.manual_seed(7)
    out = run()
    torch.manual_seed(7)
    dropout, rows = dropout_of(linear), torch.sigmoid(given) if is_of_activation else given
    mask = dropout(torch.ones_like(rows))
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (mask == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    want = torch.nn.functional.linear(rows, linear.weight, linear.bias) + 0.5 * (rows * mask) @ a.T @ b.T
    torch.testing.assert_close(out, want)
    weights = (given, a, b)
    gradients = (torch.autograd.grad(of.square().sum(), weights) for of in (out, want))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)
    assert not torch.equal(run(), out), "the next pass drops others"
    seeds = []
    for share in (0, 1):
        setattr(linear, INPUT_SHARE, share)
        torch.manual_seed(7)
        seeds.append(dropout_of(linear).seed)
    assert seeds == [dropout.seed, dropout.seed + 1], "ranks with other inputs drop others"
    linear.eval()
    torch.testing.assert_close(run(), want - 0.5 * (rows * (mask - 1)) @ a.T @ b.T)


def test_whatever_computes_with_a_weight_adds_what_the_adapter_adds():
    torch.manual_seed(0)
    rows, layer = torch.randn(3, 32), nn.Module()
    layer.q_proj = linear = nn.Linear(32, 16)
    plain, of_activation = linear(rows), linear_of_activation(linear, torch.sigmoid, rows)
    adapt(linear, 4, 0.5)
    a, b = linear.lora_A.weight, linear.lora_B.weight
    torch.testing.assert_close(linear(rows) - plain, 0.5 * rows @ a.T @ b.T)
    added = linear_of_activation(linear, torch.sigmoid, rows) - of_activation
    torch.testing.assert_close(added, 0.5 * rows.sigmoid() @ a.T @ b.T)
    pytest.importorskip("torchao.float8", reason="needs the packages of dflop[fp8]")
    without = nn.Module()
    without.q_proj = nn.Linear(32, 16)
    without.load_state_dict(layer.state_dict(), strict=False)
    for module in (layer, without):
        use_float8([module], "tensorwise", torch.device("cpu"))
    torch.testing.assert_close(linear(rows) - without.q_proj(rows), 0.5 * rows @ a.T @ b.T)
