"""Norms and MLPs that keep less compute what Hugging Face's do, and in bfloat16 are as near to float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dflop.models.fused import fuse
from dflop.models.weights import build_empty
from tests.models.tiny_families import CASES

HIDDEN, WIDTH = 48, 160


def modules() -> dict[str, nn.Module]:
    from transformers import Qwen2Config, SiglipVisionConfig  # seconds of every collection
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
    from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionMlp
    from transformers.models.siglip.modeling_siglip import SiglipMLP

    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH}
    norm = Qwen2RMSNorm(HIDDEN)
    nn.init.normal_(norm.weight)
    return {
        "RMS norm": norm,
        "gated MLP": Qwen2MLP(Qwen2Config(**sizes)),
        "plain MLP": SiglipMLP(SiglipVisionConfig(**sizes)),
        "QuickGELU": VisionMlp(HIDDEN, WIDTH, "quick_gelu"),
    }


def run(module: nn.Module, dtype: torch.dtype, *, fused: bool, frozen: bool) -> dict[str, torch.Tensor]:
    """Output and gradients, in float32, for one input."""
    module = copy.deepcopy(module).to(dtype).requires_grad_(not frozen)
    if fused:
        fuse(module)
    torch.manual_seed(0)
    hidden = torch.randn(2, 30, HIDDEN).to(dtype).requires_grad_()
    out = module(hidden)
    out.backward(torch.randn(2, 30, HIDDEN).to(dtype))
    found = {"out": out, "hidden": hidden.grad} | {n: p.grad for n, p in module.named_parameters() if not frozen}
    return {name: tensor.detach().float() for name, tensor in found.items()}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["RMS norm", "gated MLP", "plain MLP", "QuickGELU"])
def test_outputs_and_gradients_are_hugging_faces(name, frozen):
    torch.manual_seed(1)
    module = modules()[name]
    exact = run(module, torch.float32, fused=False, frozen=frozen)
    ours = run(module, torch.float32, fused=True, frozen=frozen)
    half = run(module, torch.bfloat16, fused=True, frozen=frozen)
    theirs = run(module, torch.bfloat16, fused=False, frozen=frozen)
    assert set(ours) == set(exact)
    for tensor, want in exact.items():
        assert error(ours[tensor], want) < 1e-6, tensor
        assert error(half[tensor], want) < 1.05 * error(theirs[tensor], want) + 1e-4, tensor


def test_models_to_be_filled_from_a_folder_keep_as_little_as_random_ones():
    case = CASES["Qwen2.5-VL"]
    models = case.build(), build_empty(case.family, case.full_config, torch.float32)
    drawn, empty = ({name for name, m in model.named_modules() if "forward" in vars(m)} for model in models)
    assert drawn == empty != set()
