"""Rules of parameters: which they mean, which number counts, and AdamW's own groups beside ours."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dflop.config import GroupConfig
from dflop.errors import ConfigError
from dflop.train.optim import Optimizer, OptimizerSettings
from dflop.train.parameter_groups import check_targets, numbers_of
from tests.train import synthetic
from tests.train.test_optim import make_parameters, set_gradients

RULES = (
    GroupConfig(targets=("vision",), lr_scale=0.2),
    GroupConfig(targets=("*.merger.*",), lr_scale=1.0),
    GroupConfig(targets=("norms", "biases", "embeddings"), weight_decay=0.0),
)


@pytest.mark.parametrize(
    ("module", "name", "num_dims", "expected"),
    [
        ("llm", "model.layers.0.mlp.up_proj.weight", 2, (1.0, 0.1)),
        ("llm", "model.layers.0.input_layernorm.weight", 1, (1.0, 0.0)),
        ("llm", "model.layers.0.self_attn.q_proj.bias", 1, (1.0, 0.0)),
        ("llm", "model.embed_tokens.weight", 2, (1.0, 0.0)),
        ("vision", "visual.patch_embed.proj.weight", 5, (0.2, 0.0)),
        ("vision", "visual.blocks.0.attn.qkv.weight", 2, (0.2, 0.1)),
        ("vision", "visual.merger.mlp.0.weight", 2, (1.0, 0.1)),
        ("vision", "visual.merger.mlp.0.bias", 1, (1.0, 0.0)),
    ],
)
def test_the_last_rule_that_gives_a_number_counts(module, name, num_dims, expected):
    assert numbers_of(RULES, 0.1, module, name, num_dims) == expected


def test_kinds_leave_what_transformers_decays():
    from transformers.trainer_pt_utils import get_parameter_names

    model = synthetic.tiny_model()
    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)", r"ln_q"]
    theirs = set(get_parameter_names(model, [nn.LayerNorm], forbidden))
    rules = (GroupConfig(targets=("norms", "biases"), weight_decay=0.0),)
    ours = {n for n, p in model.named_parameters() if numbers_of(rules, 0.1, "", n, p.ndim)[1] > 0}
    norms = {name for name in theirs - ours if ".norm" in name}  # Qwen2.5-VL's are no LayerNorm and named norm1, norm2
    assert theirs - ours == norms
    assert not ours - theirs


@pytest.mark.parametrize("target", ["visoin", "norm", "*.mergre.*"])
def test_a_target_that_names_nothing_is_refused(target):
    rules = (RULES[0], GroupConfig(targets=("llm", target), lr_scale=0.5))
    names = [name for name, _ in synthetic.tiny_model().named_parameters()]
    with pytest.raises(ConfigError) as raised:
        check_targets(rules, ("vision", "audio", "llm"), names)
    assert f"`{target}` names no parameter" in raised.value.what
    assert raised.value.where == "train.groups.1.targets"


def test_patterns_wait_for_the_names_of_a_model():
    check_targets((GroupConfig(targets=("*.merger.*", "norms"), lr_scale=0.5),), ("vision", "llm"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_get_the_numbers_of_torch(dtype):
    ours = make_parameters(3, dtype)  # p0 is a matrix, p1 a vector, p2 a scalar
    exact = {name: nn.Parameter(p.detach().float()) for name, p in copy.deepcopy(ours).items()}
    rules = (GroupConfig(targets=("norms",), weight_decay=0.0), GroupConfig(targets=("llm",), lr_scale=0.5))
    settings = OptimizerSettings(0.1, 0.3, rules=rules)
    optimizer = Optimizer(ours, settings, modules={"p0": "vision", "p1": "vision", "p2": "llm"})
    groups = [(("p0",), 1.0, 0.3), (("p1",), 1.0, 0.0), (("p2",), 0.5, 0.0)]
    reference = torch.optim.AdamW(
        [{"params": [exact[n] for n in names], "weight_decay": decay} for names, _, decay in groups],
        lr=0.1, betas=settings.betas, eps=settings.eps,
    )  # fmt: skip
    for step, rate in enumerate((0.1, 0.01)):
        set_gradients(ours, step, exact)
        optimizer.step(rate)
        for group, (_, scale, _) in zip(reference.param_groups, groups, strict=True):
            group["lr"] = rate * scale
        reference.step()
    for name, p in ours.items():
        assert torch.equal(p, exact[name].to(dtype))
