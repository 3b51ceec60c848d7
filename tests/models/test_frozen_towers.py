"""A frozen tower under a projector that trains, for every kind of encoder, whole and cut: gradients, and what runs."""

from __future__ import annotations

import pytest
import torch

from dflop.models.build import EncoderStage
from tests.models.test_slices import cuts, encoders, items_of
from tests.train.parity import PROJECTORS

ENCODERS = {name: (build, family, module) for name, build, family, module in encoders()}


@pytest.fixture(params=ENCODERS)
def encoder(request):
    """(name, build, family, module, depth)."""
    build, family, module = ENCODERS[request.param]
    return request.param, build, family, module, next(s.num_layers for s in family.specs() if s.module == module)


def run(stages, data, sizes):
    """Rows of slices in a row as ranks run them: (rows, outputs of stages, leaves of those behind the first)."""
    outputs, leaves, carry = [], [], None
    for stage in stages:
        if carry is not None:
            carry = carry.detach().requires_grad_(carry.requires_grad)
            leaves.append(carry)
        carry = stage(data if stage.is_first else None, sizes, carry)
        outputs.append(carry)
    return carry, outputs, leaves


def test_the_projector_is_what_hugging_face_calls_so(encoder):
    _, build, family, module, _ = encoder
    stage = EncoderStage(build(), family.towers[module])
    assert stage.projector, "an encoder has a projector"
    assert set(stage.projector) == {n for n in stage.names if any(part in n for part in PROJECTORS)}


def test_only_the_projector_trains_and_gets_the_same_gradients(encoder):
    name, build, family, module, depth = encoder
    data, sizes = items_of(name, family, module)
    whole = EncoderStage(build(), family.towers[module])
    expected = whole(data, sizes)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * weight).sum().backward()
    for cut in [((0, depth),), *cuts(depth)]:
        stages = [EncoderStage(build(), family.towers[module], layers) for layers in cut]
        seen: list[object] = []
        for stage in stages:
            stage.freeze_tower()
            for layer in stage.layers:
                layer.register_forward_hook(lambda _layer, _given, made, seen=seen: seen.append(made))
        rows, outputs, leaves = run(stages, data, sizes)
        assert len(seen) == depth
        made = [out[0] if isinstance(out, tuple) else out for out in seen]
        assert not any(out.requires_grad for out in made), f"{cut}: a frozen layer runs under autograd"
        gradient = weight
        for output, leaf in zip(reversed(outputs), [*reversed(leaves), None], strict=True):
            if output.requires_grad:
                output.backward(gradient)
            gradient = leaf.grad if leaf is not None and leaf.requires_grad else None
        assert torch.allclose(rows, expected, atol=1e-6), cut
        for stage in stages:
            for parameter, p in stage.names.items():
                if parameter in stage.projector:
                    want = whole.names[parameter].grad
                    assert torch.allclose(p.grad, want, rtol=1e-4, atol=1e-5 * float(want.abs().max())), parameter
                else:
                    assert p.grad is None
                    assert not p.requires_grad


def test_the_family_knows_which_stages_hold_a_projector(encoder):
    _, build, family, module, depth = encoder
    layers = family.projector_layers(module)
    for cut in cuts(depth):
        for first, end in cut:
            stage = EncoderStage(build(), family.towers[module], (first, end))
            assert bool(stage.projector) == any(first <= layer < end for layer in layers), (first, end)
