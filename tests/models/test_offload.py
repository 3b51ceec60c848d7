"""Layers that keep what they save on the host: the same gradients, and nothing of it left on the device meanwhile."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from dflop.models import offload
from dflop.models.offload import Offload, spread

WIDTH, ROWS = 16, 8


class Layer(nn.Module):
    """Saves one tensor for two Linears, a tensor it is given, and one that is overwritten in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(hidden)
        made = self.one(inner) * self.two(inner)
        return hidden + self.out(made.sin_().mul(scale))


@pytest.fixture
def copies(monkeypatch) -> list[weakref.ref]:
    """Tensors on the host that are still there."""
    found = []

    def host_like(tensor):
        found.append(weakref.ref(made := torch.empty_like(tensor)))
        return made

    monkeypatch.setattr(offload, "host_like", host_like)
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    return found


def losses_and_gradients(layers, sent, *, microbatches=3):
    """Forward passes of all microbatches, then their backward passes, as in the warm-up of 1F1B."""
    host, scale = Offload(), torch.linspace(0.5, 1.5, WIDTH)
    losses = []
    for k in range(microbatches):
        hidden = torch.full((ROWS, WIDTH), 0.1 * (k + 1))
        for place, layer in enumerate(layers):
            forward = functools.partial(layer, scale=scale)
            hidden = host.run(layer, place, forward, hidden) if place in sent else forward(hidden)
        losses.append(hidden.square().sum())
    yield losses
    for loss in losses:
        loss.backward()
    found = [float(loss.detach()) for loss in losses], [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    losses.clear()
    yield found


def make_layers(count):
    torch.manual_seed(0)
    return [Layer() for _ in range(count)]


@pytest.mark.parametrize("sent", [{0}, {1, 3}, {0, 1, 2, 3}])
def test_gradients_are_the_same_bit_by_bit(copies, sent):
    layers = make_layers(4)
    (_, (expected, wanted)), (_, (got, gradients)) = (tuple(losses_and_gradients(layers, of)) for of in (set(), sent))
    assert got == expected
    assert copies
    for gradient, want in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, want)


def test_a_tensor_is_copied_once_and_what_is_shared_not_at_all(copies):
    steps = losses_and_gradients(make_layers(1), {0}, microbatches=1)
    next(steps)
    # tanh's result, the two factors, what sin was taken of, its product: not the weights, the scale or the input twice
    assert len(copies) == 5, [tuple(ref().shape) for ref in copies]


def test_the_host_forgets_what_a_backward_pass_has_used(copies):
    steps = losses_and_gradients(make_layers(3), {0, 2})
    losses = next(steps)
    held = sum(ref() is not None for ref in copies)
    losses.pop(0).backward()
    gc.collect()
    assert sum(ref() is not None for ref in copies) == held * 2 // 3
    next(steps)
    gc.collect()
    assert not any(ref() is not None for ref in copies)


def test_the_layer_before_comes_back_with_the_one_behind_it_and_no_other_microbatch(copies, monkeypatch):
    fetched = []
    original = offload._LayerPass.fetch
    monkeypatch.setattr(offload._LayerPass, "fetch", lambda of: (fetched.append(of), original(of)))
    steps = losses_and_gradients(make_layers(4), {0, 1, 3})
    losses = next(steps)
    losses.pop().backward()
    places = list(dict.fromkeys((of.place, id(of)) for of in fetched))
    assert [place for place, _ in places] == [3, 1, 0]


@pytest.mark.parametrize(("layers", "sent"), [(1, 1), (10, 3), (80, 57), (5, 0), (7, 7)])
def test_layers_that_send_are_spread_evenly(layers, sent):
    found = spread(layers, sent)
    assert len(found) == sent
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert sent in (0, layers) or sent > layers / 2 or found[-1] < layers - 1
