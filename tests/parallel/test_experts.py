"""Experts that ranks share compute what transformers' own do with all of them, whatever tokens are routed where."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from dflop.errors import ConfigError
from dflop.models.build import Stage
from dflop.models.generic.experts import experts_of
from dflop.parallel.experts import share_experts
from tests.train.ranks import run_ranks

NUM_EXPERTS, ACTIVE, WIDTH = 4, 2, 8
ROUTINGS = {"uneven": (0, 1, 2, 3), "one rank gets no token": (2, 3), "one expert gets no token": (0, 1, 3)}
NUM_TOKENS = (5, 3)
"""Of each rank."""


class Experts(Stage):
    """A stage that is one layer of experts."""

    def __init__(self) -> None:
        config = transformers.Qwen3VLMoeTextConfig(
            hidden_size=WIDTH, moe_intermediate_size=6, num_experts=NUM_EXPERTS, experts_implementation="eager"
        )
        layer = nn.Module()
        layer.experts = Qwen3VLMoeTextExperts(config)
        torch.manual_seed(0)
        for p in layer.parameters():
            nn.init.normal_(p)
        super().__init__(dict(layer.named_parameters()))
        self.layer = layer

    @property
    def layers(self) -> list[nn.Module]:
        return [self.layer]


def routed(rank, among):
    """(hidden states, experts, weights) of a rank's tokens."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(NUM_TOKENS[rank], WIDTH, generator=generator, requires_grad=True)
    order = [torch.randperm(len(among), generator=generator)[:ACTIVE] for _ in hidden]
    weights = torch.rand(len(hidden), ACTIVE, generator=generator, requires_grad=True)
    return hidden, torch.tensor(among)[torch.stack(order)], weights


def run(experts, rank, among):
    hidden, chosen, weights = routed(rank, among)
    out = experts(hidden, chosen, weights)
    (out * (1 + rank + torch.arange(WIDTH))).sum().backward()
    return out.detach(), hidden.grad, weights.grad


def shared(rank, folder, among):
    stage = Experts()
    parts = share_experts(stage, dist.group.WORLD)
    (experts,) = experts_of(stage.layer)
    results = run(experts, rank, among)
    return results, {name: (parts[name], p.grad) for name, p in stage.names.items()}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_outputs_and_gradients_equal_one_process(routing, tmp_path):
    whole = Experts()
    expected = [run(whole.layer.experts, rank, ROUTINGS[routing]) for rank in range(2)]
    for (results, gradients), wanted in zip(run_ranks(shared, 2, tmp_path, ROUTINGS[routing]), expected, strict=True):
        for got, want in zip(results, wanted, strict=True):
            torch.testing.assert_close(got, want)
        for name, (part, gradient) in gradients.items():
            assert gradient.shape[0] == NUM_EXPERTS // 2
            torch.testing.assert_close(gradient, part.of(whole.names[name].grad))


def refused(rank, folder):
    stage = Experts()
    before = dict(stage.names)
    with pytest.raises(ConfigError, match=r"4 experts of Qwen3VLMoeTextExperts over 3 ranks"):
        share_experts(stage, dist.group.WORLD)
    return stage.names.keys() == before.keys() and all(stage.names[n] is p for n, p in before.items())


def test_a_degree_that_does_not_divide_the_experts_is_refused(tmp_path):
    assert run_ranks(refused, 3, tmp_path) == [True] * 3
