"""Slices of an encoder, one behind the other, are the encoder: rows, gradients and names, for every kind of tower."""

from __future__ import annotations

import itertools

import pytest
import torch

from dflop.models.build import EncoderStage
from dflop.records import LLM
from tests.models.tiny_families import CASES
from tests.train import synthetic


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


@pytest.mark.parametrize(
    ("name", "build", "family", "module"), list(encoders()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_slices_in_a_row_are_the_encoder(name, build, family, module):
    tower = family.towers[module]
    data, sizes = items_of(name, family, module)
    whole = EncoderStage(build(), tower)
    expected = whole(data, sizes)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * weight).sum().backward()
    depth = next(s.num_layers for s in family.specs() if s.module == module)
    for cut in cuts(depth):
        stages = [EncoderStage(build(), tower, layers) for layers in cut]
        carry, leaves, outputs = None, [], []
        for stage in stages:
            if carry is not None:
                assert tuple(carry.shape) == stage.carry_shape(sizes)
                carry = carry.detach().requires_grad_()
                leaves.append(carry)
            carry = stage(data if stage.is_first else None, sizes, carry)
            outputs.append(carry)
        assert torch.allclose(carry, expected, atol=1e-6), cut
        gradient = weight
        for output, leaf in zip(reversed(outputs), [*reversed(leaves), None], strict=True):
            output.backward(gradient)
            gradient = leaf.grad if leaf is not None else None
        names = [n for stage in stages for n in stage.names]
        assert sorted(names) == sorted(whole.names), "every parameter on one stage"
        for stage in stages:
            for parameter, p in stage.names.items():
                want = whole.names[parameter].grad
                if want is None:
                    assert p.grad is None or not p.grad.any(), parameter
                else:
                    # Without rope, attention does not depend on a key's bias: all of its gradient is rounding.
                    least = 2e-6 if parameter.endswith("k_proj.bias") else 0.0
                    atol = max(least, 1e-5 * float(want.abs().max()))
                    assert torch.allclose(p.grad, want, atol=atol), (cut, parameter)


@pytest.mark.parametrize(
    ("name", "build", "family", "module"), list(encoders()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_everything_in_a_slice_moves_to_its_device(name, build, family, module):
    depth = next(s.num_layers for s in family.specs() if s.module == module)
    stage = EncoderStage(build(), family.towers[module], (depth - 1, depth)).to("meta")
    left = [
        f"{type(part).__name__}.{key}"
        for part in stage.modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor) and not value.is_meta
    ]
    assert not left
    assert all(buffer.is_meta for buffer in stage.buffers())
