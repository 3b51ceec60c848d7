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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["RMS norm", "gated MLP", "plain MLP", "QuickGELU"])
def test_outputs_and_gradients_are_hugging_faces(name, frozen):
    torch.manual_seed(1)
    module = modules()[name]
    (theirs, ours), (their_half, our_half) = (
        [run(module, dtype, fused=fused, frozen=frozen) for fused in (False, True)]
        for dtype in (torch.float32, torch.bfloat16)
    )
    for tensor, exact in theirs.items():
        ours_off, our_half_off, half_off = ((x[tensor] - exact).norm() for x in (ours, our_half, their_half))
        assert ours_off < 1e-6 * exact.norm(), tensor
        assert our_half_off < 1.05 * half_off + 1e-4 * exact.norm(), tensor


def test_models_to_be_filled_from_a_folder_keep_as_little_as_random_ones():
    case = CASES["Qwen2.5-VL"]
    models = case.build(), build_empty(case.family, case.full_config, torch.float32)
    drawn, empty = ({name for name, m in model.named_modules() if "forward" in vars(m)} for model in models)
    assert drawn == empty != set()


def test_a_convolution_of_one_patch_is_a_linear():
    conv = nn.Conv3d(3, 10, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    plain, patches = copy.deepcopy(conv), torch.randn(7, 3, 2, 4, 4, requires_grad=True)
    fuse(conv)
    for module in (plain, conv):
        out = module(patches)
        out.square().sum().backward()
    torch.testing.assert_close(conv(patches), plain(patches))
    torch.testing.assert_close(conv.weight.grad, plain.weight.grad)
    torch.testing.assert_close(conv.bias.grad, plain.bias.grad)
    whole = torch.randn(1, 3, 4, 8, 8)
    assert torch.equal(conv(whole), plain(whole))
