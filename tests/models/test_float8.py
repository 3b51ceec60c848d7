"""FP8 products are torchao's own, bit by bit, in a Linear, behind an activation and on frozen weights."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.float8 import use_float8
from dflop.models.fusing import fuse
from dflop.models.matmuls import MATMULS

RECIPES = ("tensorwise", "rowwise")
HIDDEN, WIDTH, NUM_TOKENS = 48, 160, 30
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def torchao():
    return pytest.importorskip("torchao.float8", reason="needs the packages of dflop[fp8]")


class Block(nn.Module):
    """Holds a Linear of attention, an MLP, and what FP8 leaves alone."""

    def __init__(self) -> None:
        from transformers import Qwen2Config  # seconds of every collection
        from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = Qwen2MLP(Qwen2Config(hidden_size=HIDDEN, intermediate_size=WIDTH))
        self.gate, self.k_proj = nn.Linear(HIDDEN, 16), nn.Linear(HIDDEN, 24)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.q_proj(hidden))
        return out


def run(block: nn.Module) -> dict[str, torch.Tensor]:
    """Output and gradients of one input."""
    torch.manual_seed(0)
    hidden = torch.randn(2, NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    out = block(hidden)
    out.backward(torch.randn(2, NUM_TOKENS, HIDDEN, dtype=torch.bfloat16))
    return {"out": out, "hidden": hidden.grad} | {n: p.grad for n, p in block.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_outputs_and_gradients_are_those_of_torchaos_linears(recipe, frozen, torchao):
    torch.manual_seed(1)
    ours = Block().bfloat16().requires_grad_(not frozen)
    theirs = copy.deepcopy(ours)
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    torchao.convert_to_float8_training(theirs, config=config)
    fuse(ours)
    use_float8([ours], recipe, CPU)
    expected, found = run(theirs), run(ours)
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_routers_and_linears_of_other_sizes_stay():
    block = Block()
    use_float8([block], "rowwise", CPU)
    names = {name for name, module in block.named_modules() if hasattr(module, MATMULS)}
    assert names == {"q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


def test_layers_without_a_linear_of_such_sizes_are_refused():
    with pytest.raises(ConfigError, match="no Linear of Sequential has sizes that are multiples of 16") as refused:
        use_float8([nn.Sequential(nn.Linear(24, 24))], "rowwise", CPU)
    assert refused.value.where == "train.fp8"


def test_a_device_without_fp8_is_refused():
    with (
        patch("torch.cuda.get_device_capability", return_value=(8, 0)),
        patch("torch.cuda.get_device_name", return_value="NVIDIA A100-SXM4-80GB"),
        pytest.raises(ConfigError, match=r"A100-SXM4-80GB \(compute capability 8.0\) has no FP8 matmuls") as refused,
    ):
        use_float8([Block()], "tensorwise", torch.device("cuda"))
    assert "8.9 or later" in refused.value.hint


def test_a_missing_torchao_is_named():
    with (
        patch.dict(sys.modules, {"torchao.float8": None}),
        pytest.raises(ConfigError, match="torchao cannot be imported") as refused,
    ):
        use_float8([Block()], "tensorwise", CPU)
    assert "dflop[fp8]" in refused.value.hint
