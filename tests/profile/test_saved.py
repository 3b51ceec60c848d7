from __future__ import annotations

import torch

from dflop.profile.saved import saved_bytes


def test_activation_bytes_are_what_autograd_saves_once_per_storage():
    weight = torch.nn.Parameter(torch.randn(8, 4))
    own = torch.nn.Parameter(torch.randn(4, 8))
    x = torch.randn(3, 4, requires_grad=True)

    def forward():
        hidden = x @ weight.t() + x @ own  # saves x and both weights, of which `own` does not count
        return (hidden * hidden.view(3, 8)).sum()  # saves hidden twice: one storage

    num_bytes, output = saved_bytes(forward, [own])
    assert num_bytes == 4 * (3 * 4 + 8 * 4 + 3 * 8)
    output.backward()
    assert weight.grad is not None


def test_a_view_keeps_all_of_its_storage():
    x, part = torch.randn(100, requires_grad=True), torch.randn(1000)[:100]
    assert saved_bytes(lambda: (x * part).sum(), [])[0] == 4 * 1000
