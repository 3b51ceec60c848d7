"""Slices of an encoder are the encoder, for every kind of tower: rows, gradients, names; also under a frozen tower."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from dflop.models import attention
from dflop.models.build import EncoderStage
from dflop.records import LLM
from tests.models.tiny_families import CASES
from tests.train import synthetic
from tests.train.parity import PROJECTORS


def encoders():
    """(name, build, family, module) of every encoder there is."""
    for name, case in CASES.items():
        yield from ((name, case.build, case.family, s.module) for s in case.family.specs() if s.module != LLM)
    for module in ("vision", "audio"):
        yield f"Omni {module}", synthetic.tiny_model, synthetic.family(), module


def items_of(name, family, module):
    """(packed data, sizes) of some items of a module."""
    if name in CASES:
        case = CASES[name]
        samples = [case.sample(n) for n in range(len(case.samples))]
        found = [(i, a) for s in samples for i, a in zip(s.items, s.arrays, strict=True)]
    else:
        shapes = synthetic.make_shapes(12, seed=1)
        source = synthetic.SyntheticSource(shapes)
        found = [
            (item, torch.from_numpy(source.array(s.sample_index, n)))
            for s in shapes
            for n, item in enumerate(s.items)
            if item.module == module
        ]
    data = torch.cat([a for _, a in found], dim=family.towers[module].data_axis)
    return data, torch.tensor([family.item_size(i) for i, _ in found])


def cuts(depth):
    """Every way of cutting so many layers into two or more stages."""
    for count in range(1, depth):
        for inner in itertools.combinations(range(1, depth), count):
            yield tuple(itertools.pairwise((0, *inner, depth)))


class Encoder:
    """An encoder of one of the families, and its items."""

    def __init__(self, name, build, family, module):
        self.tower, self.model, self.family, self.module = family.towers[module], build(), family, module
        self.depth = next(s.num_layers for s in family.specs() if s.module == module)
        self.data, self.sizes = items_of(name, family, module)

    def stage(self, layers=None):
        return EncoderStage(copy.deepcopy(self.model), self.tower, layers or (0, self.depth))

    def run(self, stages):
        """Outputs of slices in a row as ranks run them, and the leaves of those behind the first."""
        outputs, leaves, carry = [], [], None
        for stage in stages:
            if carry is not None:
                assert tuple(carry.shape) == stage.carry_shape(self.sizes)
                carry = carry.detach().requires_grad_(carry.requires_grad)
                leaves.append(carry)
            carry = stage(self.data if stage.is_first else None, self.sizes, carry)
            outputs.append(carry)
        return outputs, leaves


def pass_back(outputs, leaves, gradient):
    """Backward through slices in a row; frozen ones take and hand on nothing."""
    for output, leaf in zip(reversed(outputs), [*reversed(leaves), None], strict=True):
        if output.requires_grad:
            output.backward(gradient)
        gradient = leaf.grad if leaf is not None and leaf.requires_grad else None


@pytest.fixture(scope="module", params=[pytest.param(e, id=e[0]) for e in encoders()])
def encoder(request):
    return Encoder(*request.param)


@pytest.fixture(scope="module")
def whole(encoder):
    """(the uncut encoder with its gradients, its rows, the gradient of the rows)."""
    stage = encoder.stage()
    rows = stage(encoder.data, encoder.sizes)
    weight = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    (rows * weight).sum().backward()
    return stage, rows.detach(), weight


def test_slices_in_a_row_are_the_encoder(encoder, whole):
    uncut, expected, weight = whole
    for cut in cuts(encoder.depth):
        stages = [encoder.stage(layers) for layers in cut]
        outputs, leaves = encoder.run(stages)
        assert torch.allclose(outputs[-1], expected, atol=1e-6), cut
        pass_back(outputs, leaves, weight)
        names = [n for stage in stages for n in stage.names]
        assert sorted(names) == sorted(uncut.names), "every parameter on one stage"
        for stage in stages:
            for parameter, p in stage.names.items():
                want = uncut.names[parameter].grad
                if want is None:
                    assert p.grad is None or not p.grad.any(), parameter
                else:
                    # Without rope, attention does not depend on a key's bias: all of its gradient is rounding.
                    least = 2e-6 if parameter.endswith("k_proj.bias") else 0.0
                    atol = max(least, 1e-5 * float(want.abs().max()))
                    assert torch.allclose(p.grad, want, atol=atol), (cut, parameter)


def test_a_layer_attends_to_all_items_in_one_call(encoder, monkeypatch):
    """Windows and chunks of all items are segments of that call, whatever was told to which module in which order."""
    calls, segments = [], attention._segments
    monkeypatch.setattr(attention, "_segments", lambda *given: (calls.append(given[3]), segments(*given))[1])
    for cut in [((0, encoder.depth),), *cuts(encoder.depth)]:
        stages = [encoder.stage(layers) for layers in cut]
        for stage in stages:
            attention.use(stage, attention.SDPA)
            attention.use(stage, attention.SDPA)
        calls.clear()
        with torch.no_grad():
            encoder.run(stages)
        assert len(calls) == encoder.depth, cut
        assert {sum(lengths) for lengths in calls} <= {sum(calls[0]), calls[0][0]}, cut


def test_the_projector_is_what_hugging_face_calls_so_and_the_family_knows_where_it_is(encoder, whole):
    uncut, _, _ = whole
    assert uncut.projector, "an encoder has a projector"
    assert set(uncut.projector) == {n for n in uncut.names if any(part in n for part in PROJECTORS)}
    layers = encoder.family.projector_layers(encoder.module)
    for first, end in {span for cut in cuts(encoder.depth) for span in cut}:
        stage = encoder.stage((first, end))
        assert bool(stage.projector) == any(first <= layer < end for layer in layers), (first, end)


def test_under_a_frozen_tower_the_projector_alone_trains_and_gets_the_same_gradients(encoder, whole):
    uncut, expected, weight = whole
    for cut in [((0, encoder.depth),), *cuts(encoder.depth)]:
        stages = [encoder.stage(layers) for layers in cut]
        seen: list[object] = []
        for stage in stages:
            stage.freeze_tower()
            for layer in stage.layers:
                layer.register_forward_hook(lambda _layer, _given, made, seen=seen: seen.append(made))
        outputs, leaves = encoder.run(stages)
        assert len(seen) == encoder.depth
        made = [out[0] if isinstance(out, tuple) else out for out in seen]
        assert not any(out.requires_grad for out in made), f"{cut}: a frozen layer runs under autograd"
        pass_back(outputs, leaves, weight)
        assert torch.allclose(outputs[-1], expected, atol=1e-6), cut
        for stage in stages:
            for parameter, p in stage.names.items():
                if parameter in stage.projector:
                    want = uncut.names[parameter].grad
                    assert torch.allclose(p.grad, want, rtol=1e-4, atol=1e-5 * float(want.abs().max())), parameter
                else:
                    assert (p.grad, p.requires_grad) == (None, False)


def test_everything_in_a_slice_moves_to_its_device(encoder):
    stage = encoder.stage((encoder.depth - 1, encoder.depth)).to("meta")
    left = [
        f"{type(part).__name__}.{key}"
        for part in stage.modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor) and not value.is_meta
    ]
    assert not left
    assert all(buffer.is_meta for buffer in stage.buffers())
