"""Encoders of every kind of tower: attention in one call, what the projector is, a frozen tower."""

from __future__ import annotations

import copy

import pytest
import torch

from dflop.models import attention
from dflop.models.build import EncoderStage, Gathered
from dflop.records import LLM
from dflop.simulate.pieces import num_parts
from tests.models.tiny_families import CASES
from tests.train import synthetic
from tests.train.parity import PROJECTORS


def encoders():
    """(name, build, family, module) of every encoder there is."""
    for name, case in CASES.items():
        yield from ((name, case.build, case.family, s.module) for s in case.family.specs() if s.module != LLM)
    for module in ("vision", "audio"):
        yield f"Omni {module}", synthetic.tiny_model, synthetic.family(), module


def arrays_of(name, module):
    """(item, its array) of some items of a module."""
    if name in CASES:
        case = CASES[name]
        samples = [case.sample(n) for n in range(len(case.samples))]
        return [(i, a) for s in samples for i, a in zip(s.items, s.arrays, strict=True)]
    shapes = synthetic.make_shapes(12, seed=1)
    source = synthetic.SyntheticSource(shapes)
    return [
        (item, torch.from_numpy(source.array(s.sample_index, n)))
        for s in shapes
        for n, item in enumerate(s.items)
        if item.module == module
    ]


def items_of(name, family, module):
    """(packed data, sizes) of some items of a module."""
    found = arrays_of(name, module)
    data = torch.cat([a for _, a in found], dim=family.towers[module].data_axis)
    return data, torch.tensor([family.item_size(i) for i, _ in found])


class Encoder:
    """An encoder of one of the families, and its items."""

    def __init__(self, name, build, family, module):
        self.tower, self.model, self.family, self.module = family.towers[module], build(), family, module
        self.items = arrays_of(name, module)
        self.depth = next(s.num_layers for s in family.specs() if s.module == module)
        self.data, self.sizes = items_of(name, family, module)

    def stage(self):
        return EncoderStage(copy.deepcopy(self.model), self.tower)


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


def test_a_layer_attends_to_all_items_in_one_call(encoder, monkeypatch):
    """Windows and chunks of all items are segments of that call, whatever was told to which module in which order."""
    calls, segments = [], attention._segments
    monkeypatch.setattr(attention, "_segments", lambda *given: (calls.append(given[3]), segments(*given))[1])
    stage = encoder.stage()
    attention.use(stage, attention.SDPA)
    attention.use(stage, attention.SDPA)
    with torch.no_grad():
        stage(encoder.data, encoder.sizes)
    assert len(calls) == encoder.depth
    assert {sum(lengths) for lengths in calls} <= {sum(calls[0]), calls[0][0]}


def test_the_projector_is_what_hugging_face_calls_so(encoder, whole):
    uncut, _, _ = whole
    assert uncut.projector, "an encoder has a projector"
    assert set(uncut.projector) == {n for n in uncut.names if any(part in n for part in PROJECTORS)}


def test_under_a_frozen_tower_the_projector_alone_trains_and_gets_the_same_gradients(encoder, whole):
    uncut, expected, weight = whole
    stage, made = encoder.stage(), []
    stage.freeze_tower()
    for layer in stage.layers:
        layer.register_forward_hook(lambda _layer, _given, out: made.append(out[0] if isinstance(out, tuple) else out))
    rows = stage(encoder.data, encoder.sizes)
    assert len(made) == encoder.depth
    assert not any(out.requires_grad for out in made), "a frozen layer runs under autograd"
    rows.backward(weight)
    assert torch.allclose(rows, expected, atol=1e-6)
    for parameter, p in stage.names.items():
        if parameter in stage.projector:
            want = uncut.names[parameter].grad
            assert torch.allclose(p.grad, want, rtol=1e-4, atol=1e-5 * float(want.abs().max())), parameter
        else:
            assert (p.grad, p.requires_grad) == (None, False)


def half_of(encoder, *, is_later):
    """(data, sizes, features per item) of the later half of every item's tiles or frames, or of the rest."""
    data, sizes, counts = [], [], []
    for item, array in encoder.items:
        parts = num_parts(item)
        low, high = (parts - parts // 2, parts) if is_later else (0, parts - parts // 2)
        counts.append(encoder.family.num_features(item) // parts * (high - low))
        if low < high:
            each = array.shape[0] // parts
            data.append(array if parts == 1 else array[low * each : high * each])
            size = encoder.family.item_size(item)
            sizes.append(size if parts == 1 else (high - low, *size[1:]))
    return data and torch.cat(data, encoder.tower.data_axis), torch.tensor(sizes), counts


def test_tiles_that_others_encode_make_the_same_rows(encoder, whole):
    stage, rows, _ = whole
    *first, first_counts = half_of(encoder, is_later=False)
    *later, later_counts = half_of(encoder, is_later=True)
    assert bool(len(later[1])) == (encoder.module == "vision")
    of_later = rows[:0]
    if len(later[1]):
        of_later = stage._encode(stage.shell, stage.module, *later, stage.arithmetic(later[1]))

    def exchange(features):
        both = zip(features.split(first_counts), of_later.split(later_counts), strict=True)
        return torch.cat([part for pair in both for part in pair])

    found = stage(*first, gathered=Gathered(exchange, encoder.sizes))
    assert torch.allclose(found, rows, atol=1e-5)


def test_everything_of_an_encoder_moves_to_its_device(encoder):
    stage = encoder.stage().to("meta")
    left = [
        f"{type(part).__name__}.{key}"
        for part in stage.modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor) and not value.is_meta
    ]
    assert not left
    assert all(buffer.is_meta for buffer in stage.buffers())
