"""The config of a model's folder as transformers reads it, or one sentence that says what to change."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError
from dflop.models.generic.classes import ACTIVE, entry_of, trained_config
from dflop.models.processor_settings import read_object
from dflop.models.unsupported import (
    EXPERTS,
    refuse_adapter,
    refuse_layers,
    refuse_missing_files,
    refuse_quantized,
    refuse_type,
)

_CONFIG = "config.json"
_FLOAT = "__float__"
_MAX_CHARS = 240
_SIZES = ("hidden_size", "num_hidden_layers", "depth", "num_attention_heads", "vocab_size")
"""Entries of sections that count something that no model is without."""
_IN_MODELS = "/transformers/models/"


def read_folder(folder: Path) -> Any:
    """The trained part of a model's config.

    Args:
        folder: Folder of the model, or the `config.json` in it.

    Raises:
        ConfigError: dflop cannot check such a model; the message names the key and what to do.
    """
    folder = folder.parent if folder.name == _CONFIG else folder
    path = folder / _CONFIG
    refuse_adapter(folder)
    config = read_config(read_object(path, "a model's config"), str(path))
    refuse_missing_files(folder)
    return config


def read_config(stated: Mapping[str, Any], where: str) -> Any:
    """The trained part of a config.

    Args:
        stated: Content of a `config.json`.
        where: It comes from, for errors.

    Raises:
        ConfigError: as `read_folder`.
    """
    refuse_quantized(stated, where)
    refuse_type(stated, where)
    config = trained_config(_parsed(stated, where))
    refuse_layers(text := config.get_text_config(), "" if text is config else "text_config.", where)
    if problem := next(contradictions(config), None):
        key, what = problem
        raise ConfigError(f"`{key}`: {what}", where=where, hint=f"correct `{key}`; released models agree here")
    return config


def _parsed(stated: Mapping[str, Any], where: str) -> Any:
    import transformers

    config_class: Any = transformers.CONFIG_MAPPING[stated["model_type"]]
    try:
        return config_class.from_dict(_with_floats(stated))
    except Exception as error:  # whatever a config class makes of a file it does not understand
        raise ConfigError(
            f"transformers {transformers.__version__} cannot read it: {reason(error)}", where=where,
            hint=f"compare it with the defaults of {config_class.__name__}",
        ) from error  # fmt: skip


def _with_floats(stated: Any) -> Any:
    """Content of a `config.json` with the numbers that transformers writes as objects, since JSON has no infinity."""
    if isinstance(stated, Mapping):
        word = stated.get(_FLOAT)
        return float(word) if isinstance(word, str) else {key: _with_floats(value) for key, value in stated.items()}
    return [_with_floats(value) for value in stated] if isinstance(stated, list) else stated


def contradictions(config: Any) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) of entries that cannot both hold; released models have none."""
    yield from _sizes(config)
    text = config.get_text_config()
    section = "" if text is config else "text_config."
    heads, groups = (entry_of(text, key) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        yield f"{section}num_key_value_heads", f"{groups} does not divide {heads} attention heads"
    rope = entry_of(text, "rope_parameters") or {}
    parts, width = rope.get("mrope_section"), entry_of(text, "head_dim") or 0
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    if parts and half and sum(parts) != half and len(parts) == 3:
        yield (
            f"{section}rope_parameters.mrope_section",
            f"{parts} adds up to {sum(parts)}, half of a rotary head is {half}",
        )
    vision = entry_of(config, "vision_config")
    out = entry_of(vision, "out_hidden_size") if vision is not None else None
    hidden = entry_of(text, "hidden_size")
    if isinstance(out, int) and isinstance(hidden, int) and out != hidden:
        yield "vision_config.out_hidden_size", f"rows of {out} for a decoder of width {hidden}"


def _sizes(config: Any, section: str = "") -> Iterator[tuple[str, str]]:
    """(key, what is wrong) of sizes that leave nothing to train, and of more experts for a token than there are."""
    for key in _SIZES:
        if isinstance(size := entry_of(config, key), int) and size < 1:
            yield f"{section}{key}", f"{size} is not a positive number"
    num_experts = next((n for key in EXPERTS if isinstance(n := entry_of(config, key), int) and n), 0)
    for key in ACTIVE:
        if num_experts and isinstance(num := entry_of(config, key), int) and num > num_experts:
            yield f"{section}{key}", f"{num} experts for a token, of {num_experts}"
    for name in getattr(config, "sub_configs", ()):
        if (below := entry_of(config, name)) is not None:
            yield from _sizes(below, f"{section}{name}.")


def is_of_model(error: BaseException) -> bool:
    """Whether an error came up in a model's code of transformers, and not in dflop's."""
    return any(_IN_MODELS in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def reason(error: BaseException) -> str:
    """An error in one line, with the place in transformers where it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if _IN_MODELS in frame.filename]
    place = f" ({Path(inside[-1].filename).name}:{inside[-1].lineno})" if inside else ""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:_MAX_CHARS]}{place}"
