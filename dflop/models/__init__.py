"""Model families by name. Importing this room costs nothing; a family's file is loaded when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.models.family import Family

FAMILIES: Mapping[str, tuple[str, str]] = {
    "qwen2_5_omni_thinker": ("dflop.models.families.qwen2_5_omni", "Qwen25OmniThinker"),
}
"""Family name -> (module, class). Adding a family is one file in `families/` and one line here."""


def load_family(name: str, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> Family:
    """Family `name` bound to a Hugging Face config and media limits.

    Raises:
        ConfigError: unknown family, or a media limit the family does not know.
    """
    if name not in FAMILIES:
        raise ConfigError(f"unknown model family `{name}`", where="model.family", hint=did_you_mean(name, FAMILIES))
    module_name, class_name = FAMILIES[name]
    family_class: type[Family] = getattr(importlib.import_module(module_name), class_name)
    return family_class(hf_config, media)
