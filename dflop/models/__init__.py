"""A Hugging Face config -> media rules, sizes and stages of a model; families by name.

Importing this room costs nothing; a family's file is loaded when asked for. `media.py` has what the data profiler
needs of a family (`load_rules`), `family.py` what it takes to size, cut and train one (`load_family`); a small file per
family is in `families/`. Only files that cut, fill, run or export a model import torch: `build.py`, `loss.py`,
`slices.py`, `taps.py`, `encoders.py`, `positions.py`, `attention.py`, `ways.py`, `weights.py`, `hf_folder.py`. The rest
serves the data profiler and the planner without torch. flash_attn is optional and imported in a function.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.models.family import Family, TrainableFamily
from dflop.models.media import MediaRules

FAMILIES: Mapping[str, tuple[str, str]] = {
    "internvl": ("dflop.models.families.internvl", "InternVl"),
    "llava_onevision": ("dflop.models.families.llava_onevision", "LlavaOnevision"),
    "qwen2_5_omni_thinker": ("dflop.models.families.qwen2_5_omni", "Qwen25OmniThinker"),
    "qwen2_5_vl": ("dflop.models.families.qwen2_5_vl", "Qwen25Vl"),
    "qwen2_audio": ("dflop.models.families.qwen2_audio", "Qwen2Audio"),
    "qwen2_vl": ("dflop.models.families.qwen2_vl", "Qwen2Vl"),
    "qwen3_vl": ("dflop.models.families.qwen3_vl", "Qwen3Vl"),
}
"""Family name -> (module, class). Adding a family is one file in `families/` and one line here."""


def load_rules(name: str, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> MediaRules:
    """Media rules of family `name`, bound to a Hugging Face config and media limits; enough to profile data.

    Raises:
        ConfigError: unknown family, or a media limit the family does not know.
    """
    if name not in FAMILIES:
        raise ConfigError(f"unknown model family `{name}`", where="model.family", hint=did_you_mean(name, FAMILIES))
    return _class_of(name)(hf_config, media)


def load_family(name: str, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> Family:
    """Family `name` bound to a Hugging Face config and media limits; enough to size, build and profile its modules.

    Raises:
        ConfigError: unknown family, or a media limit it does not know.
    """
    rules = load_rules(name, hf_config, media)
    assert isinstance(rules, Family)
    return rules


def load_trainable(name: str, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> TrainableFamily:
    """As `load_family`, for training.

    Raises:
        ConfigError: as `load_family`, or the family cannot turn decoded media into encoder input yet.
    """
    family = load_rules(name, hf_config, media)
    if not isinstance(family, TrainableFamily):
        raise ConfigError(
            f"family `{name}` can be profiled and planned, but not trained yet",
            where="model.family",
            hint=f"families that train: {', '.join(_trainable())}",
        )
    return family


def _trainable() -> list[str]:
    return [name for name in FAMILIES if issubclass(_class_of(name), TrainableFamily)]


def _class_of(name: str) -> type[MediaRules]:
    module_name, class_name = FAMILIES[name]
    found: type[MediaRules] = getattr(importlib.import_module(module_name), class_name)
    return found
