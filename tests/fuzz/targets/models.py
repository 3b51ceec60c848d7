"""What a model says of itself: `config.json`, a processor's settings, the keyword arguments in a configuration."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from ruamel.yaml import YAML

from dflop import resources
from dflop.models import FAMILIES, load_family
from dflop.models.hub import TYPES, read_hub_model
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt

_PROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 1003520,
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
    "min_patches": 1,
}
_SIDES = ((640, 480), (28, 28), (8000, 60), (1, 1))


@functools.cache
def _models() -> tuple[dict[str, Any], ...]:
    files = sorted((resources.path("configs") / "models").glob("*.yaml"))
    return tuple(YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8")) for file in files)


def _hub_configs() -> tuple[dict[str, Any], ...]:
    found = []
    for model in _models():
        for kind, (family, section) in TYPES.items():
            if family == model["family"]:
                stated = model.get("hf_config", {})
                found.append({"model_type": kind, **({section: stated} if section else stated)})
    return tuple(found)


def _sections() -> st.SearchStrategy[Any]:
    sound = [
        {"family": m["family"], "hf_config": m.get("hf_config", {}), "media": m.get("media", {})} for m in _models()
    ]
    # Keys that a family reads and these files leave to their defaults.
    for one in sound:
        one["media"] = {"max_pixels": 3136, **one["media"]} if "qwen" in one["family"] else one["media"]
    return st.sampled_from(sound).flatmap(lambda one: hostile.broken(one, _NUMBERS | hostile.VALUES))


_NUMBERS = st.one_of(hostile.INTEGERS, hostile.FLOATS, st.lists(hostile.INTEGERS, max_size=3))


def _section(folder: Path) -> Callable[[Any], None]:
    def check(example: dict[str, Any]) -> None:
        stated, media = example.get("hf_config"), example.get("media")
        if not isinstance(stated, dict) or not isinstance(media, dict):
            return  # a configuration refuses that
        if not isinstance(example.get("family"), str) or example["family"] not in FAMILIES:
            return
        family = attempt(load_family, example["family"], stated, media)
        if family is not None:
            _ask(family)

    return check


def _ask(family: Any) -> None:
    """What planning and profiling of data ask of a family."""
    assert family.rules_key
    specs = attempt(family.specs)
    for spec in specs or ():
        assert min(spec.num_layers, spec.num_layer_params) > 0
    assert family.max_level < 100
    for kind in family.media_tokens:
        for width_px, height_px in _SIDES:
            try:
                placed = family.place(kind, width_px=width_px, height_px=height_px, num_frames=8, duration_s=4.0)
            except ValueError:
                continue
            assert placed.num_rows > 0


def _hub(folder: Path) -> Callable[[Any], None]:
    def check(example: tuple[Any, Any]) -> None:
        for name, content in zip(("config.json", "preprocessor_config.json"), example, strict=True):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name).write_bytes(data)
        found = attempt(read_hub_model, folder / "config.json")
        if found is not None:
            assert found.num_params > 0
            _ask(found.family)

    return check


def _hub_files() -> st.SearchStrategy[Any]:
    values = _NUMBERS | hostile.VALUES
    configs = st.sampled_from(_hub_configs()).flatmap(lambda one: hostile.broken(one, values))
    texts = hostile.broken_bytes([json.dumps(one).encode() for one in _hub_configs()])
    return st.tuples(configs | texts, st.just(_PROCESSOR) | hostile.broken(_PROCESSOR, values))


TARGETS = (
    Target("model-section", "`model.hf_config` and `model.media` with values of any type", _sections, _section),
    Target("model-config-json", "`config.json` and `preprocessor_config.json` of a model", _hub_files, _hub, quick=4),
)
