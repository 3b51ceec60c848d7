"""A Hugging Face config -> media rules, sizes and stages of a model; families by name.

Importing this room costs nothing; a family's file is loaded when asked for. `media.py` has what the data profiler
needs of a family, `family.py` what it takes to size, cut and train one; a small file per family is in `families/`.
Only files that cut, fill, run or export a model import torch (`tests/test_imports.py` lists them). The rest serves
the data profiler and the planner without torch. `generic/` reads, checks and runs models of any other type, with torch.
flash_attn is optional and imported in a function.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.models.family import GENERIC, Family

FAMILIES: Mapping[str, tuple[str, str]] = {
    "internvl": ("dflop.models.families.internvl", "InternVl"),
    "llava_onevision": ("dflop.models.families.llava_onevision", "LlavaOnevision"),
    "qwen2_5_omni_thinker": ("dflop.models.families.qwen2_5_omni", "Qwen25OmniThinker"),
    "qwen2_5_vl": ("dflop.models.families.qwen2_vl", "Qwen25Vl"),
    "qwen2_audio": ("dflop.models.families.qwen2_audio", "Qwen2Audio"),
    "qwen2_vl": ("dflop.models.families.qwen2_vl", "Qwen2Vl"),
    "qwen3_vl": ("dflop.models.families.qwen3_vl", "Qwen3Vl"),
}
"""Family name -> (module, class). Adding a family is one file in `families/` and one line here.

A type has a file for what `generic` lacks: media rules without a processor's files, and towers that take all items of a
microbatch in one call where companions of pixels do not follow from sizes.
"""

__all__ = ["FAMILIES", "GENERIC", "Family", "load_family"]


def load_family(
    name: str, hf_config: Mapping[str, Any], media: Mapping[str, Any], processor: Path | None = None,
    cache: Path | None = None,
) -> Family:  # fmt: skip
    """Family `name` bound to a Hugging Face config and media limits.

    Args:
        name: One of `FAMILIES`, or `generic`.
        hf_config: As the family takes it.
        media: Limits that differ from the family's defaults.
        processor: Folder of the processor, which `generic` needs.
        cache: Where `generic` keeps what it reads; None: in this process only.

    Raises:
        ConfigError: unknown family, or a media limit it does not know.
    """
    if name == GENERIC:
        from dflop.models.generic.family import GenericFamily

        return GenericFamily(hf_config, media, processor, cache)
    if name not in FAMILIES:
        hint = did_you_mean(name, (*FAMILIES, GENERIC))
        raise ConfigError(f"unknown model family `{name}`", where="model.family", hint=hint)
    module_name, class_name = FAMILIES[name]
    found: type[Family] = getattr(importlib.import_module(module_name), class_name)
    return found(hf_config, media)


def cache_of_models(store: Path) -> Path:
    """Where a store keeps what is read of models of the family `generic`."""
    return store / "cache" / "models"
