"""A model of any type with few layers, for probes: a module's first layers, every other module with one.

Layers of several kinds alternate, so a probe has whole turns of the pattern: the difference of two depths is then the
mean over kinds. A leading run of another kind, as dense layers in front of those of experts, is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflop.models.generic.values import Structure
from dflop.records import LLM, ModuleSpec

_MAX_TURN = 16
_DEPTHS = ("depth", "num_hidden_layers", "encoder_layers", "num_layers")


def turn_of(kinds: Sequence[str]) -> tuple[int, int]:
    """(first layer, length) of the pattern in which kinds of layers alternate.

    Args:
        kinds: Of the layers in the order of depth.
    """
    for first in range(min(len(kinds), _MAX_TURN)):
        tail = kinds[first:]
        for length in range(1, min(_MAX_TURN, len(tail)) + 1):
            if 2 * length <= len(tail) and all(a == b for a, b in zip(tail, tail[length:], strict=False)):
                return first, length
    return 0, min(len(kinds), _MAX_TURN)


def shallow_config(hf_config: Mapping[str, Any], structure: Structure, depths: Mapping[str, int]) -> dict[str, Any]:
    """Content of a config with modules cut.

    Args:
        hf_config: Of the model.
        structure: Of the model.
        depths: Layers of each module.
    """
    from dflop.models.generic.classes import config_of  # with torch, which plans do without
    from dflop.models.generic.shrink import of_layers

    config = config_of(hf_config)
    cut: dict[str, Any] = config.to_dict()
    text, old = config.get_text_config(), structure.num_layers
    first, _ = turn_of([kind for _, kind in sorted(_by_index(structure).items())])
    first = min(first, old - depths[LLM])
    chosen = range(first, first + depths[LLM])
    section = cut if text is config else cut[_key_of(config, text)]
    section |= {name: of_layers(name, value, old, chosen) for name, value in text.to_dict().items()}
    for encoder in structure.main_encoders:
        key = f"{encoder.medium}_config"
        if isinstance(tower := cut.get(key), dict):
            cut[key] = _tower(tower, encoder.num_layers, depths[encoder.medium])
    taken = cut.get("vision_feature_layer", -1)
    if taken != -1:  # behind the last layer, or the probe would run layers that nothing is taken from
        cut["vision_feature_layer"] = [-1] * len(taken) if isinstance(taken, list | tuple) else -1
    return cut


def shallow_specs(specs: Sequence[ModuleSpec], depths: Mapping[str, int]) -> tuple[ModuleSpec, ...]:
    """Specs of modules that are cut."""
    return tuple(replace(spec, layers=_first_runs(spec, depths[spec.module])) for spec in specs)


def _first_runs(spec: ModuleSpec, depth: int) -> tuple[Any, ...]:
    kinds = [kind for kind, count in spec.layers for _ in range(count)]
    first, _ = turn_of([kind.name for kind in kinds])
    first = min(first, len(kinds) - depth)
    return tuple((kind, 1) for kind in kinds[first : first + depth])


def _by_index(structure: Structure) -> dict[int, str]:
    return {index: kind.name for kind in structure.kinds for index in kind.layers}


def _key_of(config: Any, section: Any) -> str:
    keys: list[str] = [key for key in config.sub_configs if getattr(config, key, None) is section]
    return keys[0]


def _tower(section: Mapping[str, Any], old: int, depth: int) -> dict[str, Any]:
    """A tower's section with fewer layers; deep features all come from its last one."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        if name in _DEPTHS and value == old:
            found[name] = depth
        elif isinstance(value, list) and len(value) == old > 1:
            found[name] = value[:depth]
        elif name.endswith("indexes") and isinstance(value, list):
            found[name] = [depth - 1] * len(value)
        else:
            found[name] = value
    return found
