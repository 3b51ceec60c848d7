import pytest
import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.generic.classes import find_decoder
from dflop.models.generic.routers import routers_of, sigmoid, softmax
from tests.models.generic.small import Small


@pytest.mark.parametrize(
    ("kind", "layers", "scores"),
    [("qwen3_vl_moe", range(4), softmax), ("qwen3_5_moe", range(4), softmax), ("glm4v_moe", range(1, 4), sigmoid)],
)
def test_routers_are_found_with_their_rule_without_memory(kind, layers, scores):
    with torch.device("meta"):
        decoder = find_decoder(Small(kind).build())[1]
    found = routers_of(decoder.to("meta").layers, 64)
    assert list(found) == list(layers)
    assert {(r.path, r.num_experts, r.num_active, r.scores) for r in found.values()} == {("mlp.gate", 4, 2, scores)}


def test_probabilities_of_a_token_sum_to_one():
    logits = torch.randn(5, 4)
    for scores in (softmax, sigmoid):
        assert torch.allclose(scores(logits).sum(-1), torch.ones(5))


class Doubled(nn.Module):
    """A router whose weights are squares of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 64))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden @ self.weight.T
        return logits, *(logits.softmax(-1) ** 2).topk(2)


@pytest.mark.parametrize(
    ("router", "what"),
    [
        (Doubled(), "probabilities of Doubled cannot be read"), (nn.Linear(64, 4), "probabilities of Linear"),
        (nn.Identity(), "has experts and no router next to them"),
    ],
)  # fmt: skip
def test_a_router_that_cannot_be_read_is_refused_by_its_class(router, what):
    layers = find_decoder(Small("qwen3_vl_moe").build())[1].layers
    layers[0].mlp.gate = router
    with pytest.raises(ConfigError, match=what):
        routers_of(layers, 64)
