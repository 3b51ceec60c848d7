"""What is slow is named with what was measured and a remedy; clocks are stand-ins."""

import importlib.util
import itertools
from dataclasses import replace

import pytest
import torch

from dflop.models.generic import kernel_traps
from dflop.models.generic.kernel_traps import ATTENTION, EVERYTHING, EXPERTS, OWN_EXPERTS, PATCHES, traps_of
from dflop.models.generic.structure import read_structure
from tests.models.generic.configs import config_of


@pytest.fixture
def found(monkeypatch):
    """Traps by name where the slow way takes 6 s and the fast one 2."""
    seconds = itertools.cycle((6.0, 2.0))
    monkeypatch.setattr(kernel_traps, "_seconds", lambda run: run() is None or next(seconds))
    return lambda *args, **kwargs: {trap.name: trap for trap in kernel_traps.kernel_traps(*args, **kwargs)}


def test_every_pair_is_run_and_compared_on_a_gpu_and_on_a_cpu_what_needs_no_model_of_transformers(found):
    traps = found(device="cpu")
    assert [name for name, trap in traps.items() if trap.factor == 3.0] == [PATCHES, ATTENTION]
    assert not any(trap.is_hit for trap in traps.values())
    assert str(traps[PATCHES]) == "training uses a Linear in its place (x3.0 here)"
    with torch.no_grad():
        on_gpu = list(kernel_traps._found(set(EVERYTHING), (64,), torch.device("cuda"), torch.float32))
    assert [trap.name for trap in on_gpu if trap.factor == 3.0] == [PATCHES, "fla", EXPERTS, ATTENTION]


def test_a_package_that_is_missing_on_a_gpu_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    trap = kernel_traps._package("fla", "pip install flash-linear-attention", "gated delta", torch.device("cuda"), 4.0)
    assert trap.is_hit
    assert trap.remedy == "pip install flash-linear-attention"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert not kernel_traps._package("fla", "", "", torch.device("cuda"), None).is_hit


def test_heads_without_a_fused_kernel_are_named(found, monkeypatch):
    real = torch._fused_sdp_choice
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, *rest: 0 if q.shape[-1] == 320 else real(q, *rest))
    trap = found([ATTENTION], {64, 320}, "cpu")[ATTENTION]
    assert trap.is_hit
    assert "heads of 320" in trap.detail
    assert trap.remedy


def test_what_a_model_uses_is_looked_at_and_experts_of_its_own_are_named(monkeypatch):
    asked = {}
    monkeypatch.setattr(kernel_traps, "kernel_traps", lambda uses, dims: asked.update(uses=uses, dims=dims) or ())
    structure = read_structure(config_of("qwen3_vl_moe"))
    traps_of(structure)
    assert asked == {"uses": {PATCHES, EXPERTS, ATTENTION}, "dims": {16}}
    traps_of(replace(structure, kinds=tuple(replace(kind, num_stacked_params=0) for kind in structure.kinds)))
    assert OWN_EXPERTS in asked["uses"]
    assert OWN_EXPERTS not in EVERYTHING


def test_experts_of_a_class_of_its_own_are_slow(found):
    trap = found([EXPERTS, OWN_EXPERTS], device="cpu")[EXPERTS]
    assert (trap.is_hit, trap.factor) == (True, 3.0)
    assert trap.remedy
