"""A subject of parity tests whose modules have adapters; the reference has those of `peft`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflop.config import LoraConfig
from dflop.models.lora import Adapters, WithAdapters, add_adapters
from dflop.records import LLM
from tests.train.parity import Omni, Step, reference

PEFT = Path(sys.prefix) / "clients" / "peft"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = ("all-linear",)
_SEED = 7


def import_peft() -> Any:
    """The package, which is outside the environment."""
    if str(PEFT) not in sys.path:
        sys.path.append(str(PEFT))
    return importlib.import_module("peft")


@dataclass(frozen=True)
class Adapted(Omni):
    """`Omni` with adapters, none of which is zero."""

    targets: tuple[tuple[str, tuple[str, ...]], ...] = ((LLM, ATTENTION),)
    rank: int = 3
    dropout: float = 0.0

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(targets=dict(self.targets), rank=self.rank, alpha=2 * self.rank, dropout=self.dropout)

    def bare(self) -> torch.nn.Module:
        """The same without adapters."""
        return super().build()

    def build(self) -> torch.nn.Module:
        model = self.bare()
        fill(model, add_adapters(model, self.family, self.lora))
        return model

    def plain(self) -> torch.nn.Module:
        """`peft`'s adapters with the same values in Hugging Face's model, names of parameters as `peft` has them."""
        ours, plain = self.bare(), super().plain()
        adapters = add_adapters(ours, self.family, self.lora)
        fill(ours, adapters)
        peft = import_peft()
        settings = peft.LoraConfig(
            r=self.rank, lora_alpha=2 * self.rank, target_modules=list(adapters.linears), lora_dropout=0.0
        )
        peft.inject_adapter_in_model(settings, plain)
        values = {peft_name(name): p for name, p in ours.named_parameters() if name in adapters.shapes}
        with torch.no_grad():
            for name, p in plain.named_parameters():
                if (found := values.pop(name, None)) is not None:
                    p.copy_(found)
                p.requires_grad_(found is not None or name.replace(".base_layer.", ".") not in adapters.base)
        assert not values, "an adapter that peft does not have"
        return plain


def fill(model: torch.nn.Module, adapters: Adapters) -> None:
    """Give every adapter values, B as well: behind a zero A has no gradient."""
    draws = WithAdapters(None, adapters, _SEED, torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in adapters.shapes:
                generator = torch.Generator().manual_seed(len(name) + p.numel())
                p.copy_(draws.read(name) if "lora_A" in name else torch.randn(p.shape, generator=generator) / 20)


def peft_name(name: str) -> str:
    """Of an adapter's parameter."""
    return name.removesuffix(".weight") + ".default.weight"


def peft_reference(subject: Adapted, frozen: Collection[str] = ()) -> list[Step]:
    """As `reference`, gradients by our names."""
    steps = reference(subject, frozen=frozen)
    return [(loss, norm, {n.replace(".default.", "."): g for n, g in of.items()}) for loss, norm, of in steps]


def with_adapters(layout: Any, *targets: tuple[str, tuple[str, ...]], rank: int = 3, dropout: float = 0.0) -> Any:
    """The trial of a layout with adapters in its subject."""
    s = layout.subject
    subject = Adapted(s.kinds, s.tied, s.kv_heads, s.num_steps, s.batch_size, s.seed, targets, rank, dropout)
    return replace(layout.trial, subject=subject)
