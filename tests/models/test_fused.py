"""Norms and MLPs that keep less compute what Hugging Face's do, and in bfloat16 are as near to float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dflop.models.fusing import fuse
from dflop.models.weights import build_empty
from tests.models.tiny_families import CASES

HIDDEN, WIDTH = 48, 160


def packed_mlp() -> nn.Module:
    from transformers import Glm4vTextConfig
    from transformers.models.glm4v.modeling_glm4v import Glm4vTextMLP

    return Glm4vTextMLP(Glm4vTextConfig(hidden_size=HIDDEN, intermediate_size=WIDTH))


def unlike_llama() -> dict[str, nn.Module]:
    """Norms that scale by 1 + w, or round after they scaled; an MLP whose gate shares a matrix."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    classes = (Gemma3RMSNorm, Qwen3_5RMSNorm, Olmo2RMSNorm)
    return {of.__name__: of(HIDDEN) for of in classes} | {"packed MLP": packed_mlp()}


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


UNLIKE = ["Gemma3RMSNorm", "Qwen3_5RMSNorm", "Olmo2RMSNorm", "packed MLP"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["RMS norm", "gated MLP", "plain MLP", "QuickGELU", *UNLIKE])
def test_outputs_and_gradients_are_hugging_faces(name, frozen):
    torch.manual_seed(1)
    module = (unlike_llama() if name in UNLIKE else modules())[name]
    for p in module.parameters() if name in UNLIKE else ():
        nn.init.normal_(p)
    before = {name for name, _ in vars(module).items()}
    fuse(fused := copy.deepcopy(module))
    assert vars(fused).keys() - before == {"forward"}
    (theirs, ours), (their_half, our_half) = (
        [run(module, dtype, fused=fused, frozen=frozen) for fused in (False, True)]
        for dtype in (torch.float32, torch.bfloat16)
    )
    for tensor, exact in theirs.items():
        ours_off, our_half_off, half_off = ((x[tensor] - exact).norm() for x in (ours, our_half, their_half))
        assert ours_off < 1e-6 * exact.norm(), tensor
        assert our_half_off < 1.05 * half_off + 1e-4 * exact.norm(), tensor


class Scaled(nn.Module):
    """Named as an MLP is, with its parts, and no MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.down_proj, self.act_fn = nn.Linear(WIDTH, HIDDEN), nn.SiLU()

    def forward(self, hidden):
        return 0.5 * self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class Clamped(Scaled):
    """As the MLPs of GLM-5 and gpt-oss, which differ from others where inputs are large."""

    def forward(self, hidden):
        gate, up = self.gate_proj(hidden).clamp(max=50.0), self.up_proj(hidden).clamp(-50.0, 50.0)
        return self.down_proj(self.act_fn(gate) * up)


def test_what_computes_something_else_keeps_its_forward():
    from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    norms = Qwen3_5RMSNormGated(HIDDEN), Cohere2LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
    model = nn.ModuleList([Scaled(), Clamped(), *norms])
    fuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


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
