"""Qwen2-VL: a native-resolution vision tower that attends over whole frames, feeding a Qwen2 decoder.

Media are those of Qwen2.5-VL (`native_family.py`). The tower differs from its: LayerNorm, a plain MLP, no windows, and
`embed_dim` for its width where `hidden_size` is that of the LLM; so do positions, where every temporal patch counts one
however long it lasts.
"""

from __future__ import annotations

from dataclasses import replace

from dflop.models import counts
from dflop.models.families.qwen2_5_vl import Qwen25Vl
from dflop.records import LLM, ModuleSpec


class Qwen2Vl(Qwen25Vl):
    """`Qwen2VLForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_vl"
    processor = replace(Qwen25Vl.processor, whole="Qwen2VLProcessor")
    section_types = {"vision": "qwen2_vl_vision", LLM: "qwen2_vl_text"}

    def specs(self) -> tuple[ModuleSpec, ...]:
        return counts.qwen2_vision(self.vision), counts.decoder(self._text, tied=self._is_tied)
