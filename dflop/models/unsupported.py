"""Models that `dflop` cannot train: what each lacks, and the family that is nearest.

A spelling that is close says nothing about a model: Qwen3.5 under the name of Qwen3-VL has another decoder. So a type
that transformers knows is told what of it is not known here, and only a type that nobody knows is compared by spelling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.models import counts

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Entries of configs whose layers have experts."""
_MIN_COMMON = 4
_SEE = ("internvl", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_QUANTIZED = ("quantization_config", "compression_config")
_OWN_CODE = {"internvl_chat": "internvl", "llava": "llava_onevision", "llava_qwen": "llava_onevision"}
"""Types of releases with code of their own that also come in transformers' form -> that form's type."""
_CLOSEST = {
    "qwen3_5": ("qwen3_vl", "its language model has layers of linear attention"),
    "qwen3_5_moe": ("qwen3_vl", "its language model has layers of linear attention and of experts"),
}
"""What a file's sections do not tell."""


def refuse_quantized(stated: Mapping[str, Any], where: str) -> None:
    """Refuse a model whose weights are stored in fewer bits than training works with.

    Raises:
        ConfigError: its config, or a section of it, says so.
    """
    for above, section in (("", stated), *((f"{key}.", s) for key, s in stated.items() if isinstance(s, Mapping))):
        for key in _QUANTIZED:
            if not section.get(key):
                continue
            how = section[key].get("quant_method", "") if isinstance(section[key], Mapping) else ""
            raise ConfigError(
                f"`{above}{key}`: the weights are quantized{f' ({how})' if how else ''}, which dflop does not train",
                where=where,
                hint="use the release with bfloat16 weights",
            )


def unsupported(kind: str, stated: Mapping[str, Any], types: Mapping[str, Any], path: Path) -> ConfigError:
    """Why models of a type are not supported, in a line, and what is nearest to one.

    Args:
        kind: `model_type` of the file.
        stated: Its content.
        types: Those that are supported.
        path: The file.
    """
    import transformers

    if kind in _OWN_CODE and kind not in transformers.CONFIG_MAPPING:
        return ConfigError(
            f"models of type `{kind}` come with their own code; dflop supports those of transformers",
            where=str(path),
            hint=f"use the release whose name ends in `-hf`, of type `{_OWN_CODE[kind]}`",
        )
    if kind not in transformers.CONFIG_MAPPING:
        return ConfigError(f"models of type `{kind}` are not known", where=str(path), hint=did_you_mean(kind, types))
    inner = stated.get("thinker_config")
    whole = {**stated, **inner} if isinstance(inner, Mapping) else stated
    nearest, why = _CLOSEST.get(kind) or (_nearest(kind, whole), "; ".join(_reasons(whole)))
    return ConfigError(
        f"models of type `{kind}` are not supported: {why}",
        where=str(path),
        hint=f"nearest to it is `{nearest}`, but that is another architecture; valid: {', '.join(sorted(types))}; "
        f"`dflop model check {path.parent}` reports what it is made of",
    )


def _nearest(kind: str, whole: Mapping[str, Any]) -> str:
    """Of the families with as many encoders, the one whose name begins alike."""
    sees, hears = "vision_config" in whole or "vision" in kind, "audio_config" in whole
    if sees and hears:
        return "qwen2_5_omni"
    if hears:
        return "qwen2_audio"
    nearest = max(_SEE, key=lambda name: _common(name, kind))
    return nearest if _common(nearest, kind) >= _MIN_COMMON else "llava_onevision"


def _common(one: str, other: str) -> int:
    """Characters that two names have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def decoder_problem(text: Mapping[str, Any], where: str) -> ConfigError:
    """Why a language model of a known family is not supported, in a line.

    Args:
        text: Its section of a config, of a kind whose layers are not known.
        where: Key of the kind, for the error.
    """
    import transformers

    kind = str(text.get("model_type"))
    valid = ", ".join(sorted(counts.DECODERS))
    if kind not in transformers.CONFIG_MAPPING:
        what = f"the layers of a `{kind}` are not known"
        return ConfigError(what, where=where, hint=did_you_mean(kind, counts.DECODERS))
    default = transformers.CONFIG_MAPPING[kind]()
    if any(text.get(key) or getattr(default, key, None) for key in EXPERTS):
        what = f"its language model has layers of experts (`{kind}`), which are not supported"
        return ConfigError(what, where=where, hint=f"a model of the family whose language model is one of {valid}")
    return ConfigError(
        f"the layers of its language model (`{kind}`) are not known", where=where, hint=f"known: {valid}"
    )


def _reasons(whole: Mapping[str, Any]) -> Iterator[str]:
    encoders = [key for key in ("vision_config", "audio_config") if isinstance(whole.get(key), Mapping)]
    if not encoders:
        yield "it has no `vision_config` and no `audio_config`, and every family here has an encoder of media"
    text = whole.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    if any(text.get(key) for key in EXPERTS):
        yield "its language model has layers of experts"
    elif (name := text.get("model_type")) is not None and name not in counts.DECODERS:
        yield f"the layers of its language model (`{name}`) are not known"
    for key in encoders:
        name = whole[key].get("model_type")
        if name not in counts.DEFAULTS:
            yield f"its {key.removesuffix('_config')} tower{f' (`{name}`)' if name else ''} is not known"
    if encoders:
        yield "its processor's media rules are not supported"
