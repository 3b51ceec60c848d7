"""Qwen2-VL and Qwen2.5-VL: a native-resolution vision tower feeding a Qwen2 or Qwen2.5 decoder.

Images and videos follow the Hugging Face processors exactly (tests hold them equal), for videos with
`do_sample_frames`: two frames a second, the rate of the published models, where the processor's class has none. The
rules themselves are in `native_family.py`. The tower of Qwen2.5-VL has windows; that of Qwen2-VL attends over whole
frames and has LayerNorm, a plain MLP, and `embed_dim` for its width where `hidden_size` is that of the LLM.
"""

from __future__ import annotations

from dataclasses import replace

from dflop.models import counts
from dflop.models.family import Tower
from dflop.models.native_family import NativeFamily
from dflop.models.pixels import CLIP
from dflop.records import LLM, ModuleSpec


class Qwen25Vl(NativeFamily):
    """`Qwen2_5_VLForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_5_vl"
    section_types = {"vision": "qwen2_5_vl_vision", LLM: "qwen2_5_vl_text"}
    towers = {"vision": Tower("model.visual", "native", "blocks", projector=("merger",), colours=CLIP)}

    def specs(self) -> tuple[ModuleSpec, ...]:
        return counts.qwen2_5_vision(self.vision), counts.decoder(self._text, tied=self._is_tied)


class Qwen2Vl(Qwen25Vl):
    """`Qwen2VLForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_vl"
    processor = replace(Qwen25Vl.processor, whole="Qwen2VLProcessor")
    section_types = {"vision": "qwen2_vl_vision", LLM: "qwen2_vl_text"}

    def specs(self) -> tuple[ModuleSpec, ...]:
        return counts.qwen2_vision(self.vision), counts.decoder(self._text, tied=self._is_tied)
