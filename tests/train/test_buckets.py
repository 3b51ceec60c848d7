"""Sums over replicas: they begin while the last backward pass runs, and in one order on all replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflop.train import buckets
from dflop.train.buckets import GradientBuckets


class Replicas:
    """A process group of which only the size is asked."""

    def size(self):
        return 4


class Sum:
    def wait(self):
        pass


@pytest.fixture
def begun(monkeypatch):
    """Sizes of what was begun to be summed, with its owner."""
    seen = []

    def record(flat, group_dst=None, **_):
        seen.append((flat.numel(), group_dst))
        return Sum()

    monkeypatch.setattr(buckets.dist, "all_reduce", record)
    monkeypatch.setattr(buckets.dist, "reduce", record)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 200)
    return seen


def test_sums_begin_as_soon_as_gradients_are_there_and_in_the_order_of_all_replicas(begun):
    layers = [nn.Linear(n, n + 1) for n in (4, 5, 6, 7)]
    names = {f"{n}.{name}": p for n, layer in enumerate(layers) for name, p in layer.named_parameters()}
    found = GradientBuckets(names, {"1.weight": (2,), "1.bias": (2,)}, Replicas(), late={"3.bias"})
    order = [(56, None), (7 + 42, None), (6 + 30, 2), (5 + 20, None), (8, None)]  # biases come first, going backward

    def loss(first, end):
        hidden = torch.ones(1, 4 + first)
        for layer in layers[first:end]:
            hidden = layer(hidden)
        return hidden.sum()

    loss(0, 4).backward()
    assert begun == []
    found.expect_last()
    at_input = []
    layers[0].weight.register_hook(lambda _: at_input.append(list(begun)))
    loss(0, 4).backward()
    assert at_input == [order[:3]]
    assert begun == order[:4]
    found.finish()
    assert begun == order
    begun.clear()
    found.expect_last()
    loss(0, 2).backward()  # no microbatch of this replica reaches the last layers
    assert begun == []
    found.finish()
    assert begun == order
