import torch
from torch import nn

from dflop.models.generic.experts import RoutedTokens, experts_of
from tests.models.generic.small import Small


def test_tokens_are_counted_per_expert_once_and_since_the_last_time():
    layers = Small("qwen3_vl_moe").build().model.language_model.layers
    routed = RoutedTokens(dict(enumerate(layers, 5)))
    (experts,) = experts_of(layers[1])
    hidden = torch.randn(3, 64, requires_grad=True)
    chosen, weights = torch.tensor([[0, 3], [3, 1], [3, 0]]), torch.rand(3, 2)

    def again(*given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = experts(*given)
        return made

    torch.utils.checkpoint.checkpoint(again, hidden, chosen, weights, use_reentrant=False).sum().backward()
    experts(hidden[:1], top_k_index=chosen[:1], top_k_weights=weights[:1])
    with torch.no_grad():
        experts(hidden, chosen, weights)
    assert routed.take() == {5 + n: [3, 1, 0, 4] if n == 1 else [0] * 4 for n in range(len(layers))}
    assert routed.take()[6] == [0] * 4


def test_modules_without_a_routing_have_no_experts():
    assert not list(experts_of(nn.Linear(2, 2)))
    assert RoutedTokens({0: nn.Linear(2, 2)}).take() == {}
