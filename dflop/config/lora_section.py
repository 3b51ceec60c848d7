"""Section `train.lora`: low-rank adapters that train in place of the modules' weights."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from dflop.config.section import Section


class LoraConfig(Section):
    """Adapters of Linears (LoRA). The weights of a module that has adapters do not train."""

    targets: dict[str, tuple[str, ...]] = Field(min_length=1)
    """Per module (`llm`, `vision`, ...) the Linears with adapters: last names (`q_proj`), patterns of whole names
    (`*.self_attn.*`), or `all-linear`. Modules that are not named train as a whole unless they are frozen."""
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    """What adapters add is scaled by `alpha / rank`."""
    dropout: float = Field(default=0, ge=0, lt=1)
    """Share of an adapter's input that is zero in training, drawn anew in every microbatch; another layout draws
    others."""

    @property
    def scale(self) -> float:
        """Factor on what an adapter adds."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _can_be_trained(self) -> Any:
        if empty := [module for module, targets in self.targets.items() if not targets]:
            raise ValueError(f"targets.{empty[0]} is empty: name Linears, or use all-linear")
        return self
