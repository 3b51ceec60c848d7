"""The config of a model's folder as transformers reads it, or one sentence that says what to change."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.models.generic.classes import entry_of, media_types, trained_config
from dflop.models.processor_settings import read_object
from dflop.models.unsupported import refuse_quantized

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_MAX_CHARS = 240
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
    if not path.exists() and (folder / _ADAPTER).is_file():
        base = read_object(folder / _ADAPTER, "an adapter's config").get("base_model_name_or_path")
        into = f" `{base}`" if base else ""
        raise ConfigError(
            f"`{_ADAPTER}`: the folder holds an adapter, not a model", where=str(folder),
            hint=f"merge it into its base model{into} (`merge_and_unload` of peft) and save that",
        )  # fmt: skip
    config = read_config(read_object(path, "a model's config"), str(path))
    check_files(folder)
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
    _refuse_type(stated, where)
    config = trained_config(_parsed(stated, where))
    if problem := next(contradictions(config), None):
        key, what = problem
        raise ConfigError(f"`{key}`: {what}", where=where, hint=f"correct `{key}`; released models agree here")
    return config


def check_files(folder: Path) -> None:
    """Refuse a folder without a processor's or a tokenizer's files.

    Raises:
        ConfigError: it has none.
    """
    for names, what, saved_by in (
        (_PROCESSOR, "processor", "AutoProcessor"), (_TOKENIZER, "tokenizer", "AutoTokenizer"),
    ):  # fmt: skip
        if not any((folder / name).is_file() for name in names):
            raise ConfigError(
                f"no {what}: the folder has none of {', '.join(f'`{name}`' for name in names)}", where=str(folder),
                hint=f"copy them from the release, or save them with `{saved_by}.save_pretrained`",
            )  # fmt: skip


def _refuse_type(stated: Mapping[str, Any], where: str) -> None:
    """Refuse a type that is not transformers', takes no media, or has an encoder for its text."""
    import transformers

    kind, types = str(stated.get("model_type", "")), media_types()
    if stated.get("auto_map"):
        known = kind in types
        raise ConfigError(
            "`auto_map`: the model comes with remote code, which dflop does not run", where=where,
            hint=f"remove `auto_map`: transformers has its own classes of type `{kind}`" if known
            else "use the release in transformers' own format (its name often ends in `-hf`)",
        )  # fmt: skip
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"`model_type`: transformers {transformers.__version__} knows no `{kind}`", where=where,
            hint=f"upgrade transformers if the model is newer; {did_you_mean(kind, types)}",
        )  # fmt: skip
    if stated.get("is_encoder_decoder") or transformers.CONFIG_MAPPING[kind]().is_encoder_decoder:
        raise ConfigError(
            f"`is_encoder_decoder`: a `{kind}` encodes its text and attends to it from the decoder", where=where,
            hint="use a model whose decoder takes media as tokens",
        )  # fmt: skip
    if kind not in types:
        raise ConfigError(
            f"`model_type`: a `{kind}` takes text only", where=where,
            hint="use a model with an encoder of images, video or sound; text-only models gain nothing from dflop",
        )  # fmt: skip


def _parsed(stated: Mapping[str, Any], where: str) -> Any:
    import transformers

    config_class: Any = transformers.CONFIG_MAPPING[stated["model_type"]]
    try:
        return config_class.from_dict(dict(stated))
    except Exception as error:  # whatever a config class makes of a file it does not understand
        raise ConfigError(
            f"transformers {transformers.__version__} cannot read it: {reason(error)}", where=where,
            hint=f"compare it with the defaults of {config_class.__name__}",
        ) from error  # fmt: skip


def contradictions(config: Any) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) of entries that cannot both hold; released models have none."""
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
