"""Models that `dflop` does not take, each with one sentence that names the key and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError, did_you_mean
from dflop.models.processor_settings import read_object

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Entries of configs whose layers have experts."""
_QUANTIZED = ("quantization_config", "compression_config")
_ADAPTER = "adapter_config.json"
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_INDEXED = "indexed_attention"
_OWN_CODE = {"internvl_chat": "internvl", "llava": "llava_onevision", "llava_qwen": "llava_onevision"}
"""Types of releases with code of their own that also come in transformers' form -> that form's type."""


def media_types() -> Mapping[str, str]:
    """Model types of transformers that take images, video or sound, with their classes' names."""
    from transformers.models.auto import modeling_auto

    found: Mapping[str, str] = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return found


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


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder that holds an adapter and no model.

    Raises:
        ConfigError: it does.
    """
    if (folder / "config.json").exists() or not (folder / _ADAPTER).is_file():
        return
    base = read_object(folder / _ADAPTER, "an adapter's config").get("base_model_name_or_path")
    into = f" `{base}`" if base else ""
    raise ConfigError(
        f"`{_ADAPTER}`: the folder holds an adapter, not a model", where=str(folder),
        hint=f"merge it into its base model{into} (`merge_and_unload` of peft) and save that",
    )  # fmt: skip


def refuse_type(stated: Mapping[str, Any], where: str) -> None:
    """Refuse a type that is not transformers', takes no media, or has an encoder for its text.

    Args:
        stated: Content of a `config.json`.
        where: It comes from.

    Raises:
        ConfigError: it is of such a type.
    """
    import transformers

    kind, types = str(stated.get("model_type", "")), media_types()
    is_of_transformers = kind in transformers.CONFIG_MAPPING
    if stated.get("auto_map") or (kind in _OWN_CODE and not is_of_transformers):
        form = f", of type `{_OWN_CODE[kind]}`" if kind in _OWN_CODE else ""
        key = "`auto_map`" if stated.get("auto_map") else f"`model_type` `{kind}`"
        raise ConfigError(
            f"{key}: the model comes with remote code, which dflop does not run", where=where,
            hint=f"remove `auto_map`: transformers has its own classes of type `{kind}`" if kind in types
            else f"use the release in transformers' own format (its name often ends in `-hf`{form})",
        )  # fmt: skip
    if not kind:
        raise ConfigError(
            "`model_type`: the config has none", where=where,
            hint="it has to be the `config.json` of a model as transformers saves it",
        )  # fmt: skip
    if not is_of_transformers:
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


def refuse_layers(text: Any, section: str, where: str) -> None:
    """Refuse a decoder with layers of a type that no stage computes.

    Args:
        text: Config of the decoder.
        section: Prefix of its keys, for errors.
        where: It comes from.

    Raises:
        ConfigError: it has such layers.
    """
    if _INDEXED in (getattr(text, "layer_types", None) or ()):
        raise ConfigError(
            f"`{section}layer_types`: in layers of type `{_INDEXED}` an indexer chooses the keys of each token, which "
            "stages do not compute", where=where,
            hint="use a model with full, sliding, chunked, latent or linear attention",
        )  # fmt: skip


def refuse_missing_files(folder: Path) -> None:
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


def has_files(folder: Path) -> bool:
    """Whether a folder has a processor's files."""
    return any((folder / name).is_file() for name in _PROCESSOR)


def is_of_another_type(error: ConfigError) -> bool:
    """Whether a family refuses a config for the type of a section or for experts, which `generic` may take."""
    return error.where.rpartition(".")[2] in ("model_type", *EXPERTS)
