"""The models that `evidence` measures: of released sizes, or tiny for a rehearsal."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.gpu.drawn import ROOT

TABLES = (
    ("llava_onevision_qwen2_5_7b", ("vision", "llm")), ("internvl2_5_8b", ("vision",)), ("qwen2_audio_7b", ("audio",)),
)  # fmt: skip
"""Files in configs/models, and the modules of each that have their layers timed."""
DECODER = {
    "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
"""Qwen2.5-1.5B, its head untied."""


@dataclass(frozen=True)
class Subject:
    """What is measured, where, and the folder that results go to."""

    device: torch.device
    folder: Path
    tables: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]]
    """By name: model, and the modules whose layers are timed."""
    whole: Mapping[str, Any]
    """The model that is trained for a few steps."""
    is_tiny: bool

    def size(self, real: int, rehearsed: int) -> int:
        """A number of tokens or samples of the measurement, or of its rehearsal."""
        return rehearsed if self.is_tiny else real


def released(device: torch.device, folder: Path, only: Sequence[str] | None = None) -> Subject:
    """Models of released sizes; `only` some of those whose layers are timed."""
    models = {name: (_load(name), modules) for name, modules in TABLES if only is None or name in only}
    whole = copy.deepcopy(_load("internvl2_5_8b"))
    whole["hf_config"] |= {"text_config": DECODER}
    whole["media"] = {**whole["media"], "max_tiles": 6, "video_frames": 8}
    return Subject(device, folder, models, whole, False)


def tiny(device: torch.device, folder: Path) -> Subject:
    """One small InternVL in place of all of them."""
    model = copy.deepcopy(_load("internvl2_5_8b"))
    model["dtype"] = "float32" if device.type == "cpu" else "bfloat16"
    model["media"] = {"max_tiles": 2, "video_frames": 2}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    vision, text = {**small, "num_hidden_layers": 2, "image_size": 56}, {**small, "num_hidden_layers": 2}
    model["hf_config"]["vision_config"] |= vision
    model["hf_config"]["text_config"] = {**DECODER, **text, "num_key_value_heads": 1, "vocab_size": 500}
    return Subject(device, folder, {"tiny": (model, ("vision", "llm"))}, model, True)


def _load(name: str) -> dict[str, Any]:
    model: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "models" / f"{name}.yaml").read_text())
    return model
