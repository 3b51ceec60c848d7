"""Stages of every structure that is cut, out of tiny families: how to build, cut and run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflop.models.build import Stage, cut_stage
from dflop.models.family import Family
from dflop.models.generic.llm_stage import LlmStage
from dflop.records import LLM
from tests.models.test_encoders import items_of
from tests.models.tiny_families import CASES, MROPE
from tests.train import synthetic

LENGTHS, VOCAB = (9, 1, 14), 67
"""Of packed sequences; ids, which no two ranks share evenly."""


@dataclass(frozen=True)
class Stack:
    """A stage that any process can build, and one microbatch for it."""

    name: str
    """Of its items, see `items_of`."""
    model: Callable[[], torch.nn.Module]
    family: Family
    module: str

    @property
    def depth(self) -> int:
        return next(s.num_layers for s in self.family.specs() if s.module == self.module)

    def build(self) -> Stage:
        return cut_stage(self.model(), self.family, self.module, (0, self.depth))

    def forward(self, stage: Any) -> torch.Tensor:
        """Output of one microbatch with several packed sequences or items."""
        if self.module != LLM:
            rows: torch.Tensor = stage(*items_of(self.name, self.family, self.module))
            return rows
        ids = numbers(sum(LENGTHS), 4, below=VOCAB)
        positions = torch.cat([stage.positions(part, []) for part in ids.split(LENGTHS)], dim=1)
        hidden: torch.Tensor = stage(stage.embed(ids, [], []), positions, torch.tensor([0, *LENGTHS]).cumsum(0).int())
        return hidden

    def loss(self, stage: Stage, out: torch.Tensor) -> torch.Tensor:
        if isinstance(stage, LlmStage):
            where = torch.arange(0, sum(LENGTHS), 2)
            return stage.loss(out, where, numbers(len(where), 11, below=VOCAB))
        return (out - numbers(out.shape, 12)).square().sum()


def numbers(shape: object, seed: int, *, below: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (shape,) if isinstance(shape, int) else shape
    return torch.randint(below, size, generator=generator) if below else torch.randn(size, generator=generator)


def decoder(name: str, *, tied: bool = False, **options: object) -> Stack:
    """The LLM of a tiny family with four heads of keys and values."""
    case = CASES[name]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCAB}
    text = {**case.hf_config["text_config"], **heads, **options}
    case = replace(case, hf_config={**case.hf_config, "text_config": text, "tie_word_embeddings": tied})
    return Stack(name, case.build, case.family, LLM)


def encoder(name: str, **options: object) -> Stack:
    case = CASES[name]
    if options:
        vision = {**case.hf_config["vision_config"], **options}
        case = replace(case, hf_config={**case.hf_config, "vision_config": vision})
    (module,) = case.family.towers
    return Stack(name, case.build, case.family, module)


STACKS = {
    "Qwen2": decoder("LLaVA-OneVision"),
    "Llama": decoder("LLaVA-OneVision with Llama"),
    "Qwen3": decoder("Qwen3-VL", attention_bias=True),
    "Qwen3 tied": decoder("Qwen3-VL", tied=True),
    "Qwen2.5-VL text": decoder("Qwen2.5-VL", rope_parameters=MROPE | {"mrope_section": [1, 1, 1]}),
    "SigLIP": encoder("LLaVA-OneVision"),
    "SigLIP, inner states": encoder("LLaVA-OneVision with Llama"),
    "InternVL": encoder("InternVL"),
    "Qwen2.5-VL vision": encoder("Qwen2.5-VL", num_heads=4),
    "Qwen2-VL vision": encoder("Qwen2-VL"),
    "Qwen3-VL vision": encoder("Qwen3-VL"),
    "Qwen2-Audio": encoder("Qwen2-Audio"),
    **{
        f"Omni {module}": Stack(f"Omni {module}", lambda: synthetic.tiny_model(kv_heads=2), synthetic.family(2), module)
        for module in ("vision", "audio", LLM)
    },
}
