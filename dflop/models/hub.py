"""From the `config.json` that ships with a model to the `model` section of a configuration.

transformers reads the file, whatever release wrote it, and what equals its defaults is left out: what remains is short
enough to read, and means the same model. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError
from dflop.models import FAMILIES, GENERIC, load_family
from dflop.models.family import Family, check_depths
from dflop.models.generic.family import GenericFamily
from dflop.models.processor_settings import Settings, read_object, read_settings
from dflop.models.unsupported import has_files, is_of_another_type, refuse_quantized

TYPES: Mapping[str, tuple[str, str]] = {
    **{name: (name, "") for name in FAMILIES},
    "qwen2_5_omni": ("qwen2_5_omni_thinker", "thinker_config"),
}
"""`model_type` -> (family, section of the file that describes it)."""

_NOISE = ("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model as its own files describe it."""

    family: Family
    hf_config: Mapping[str, Any]
    """What differs from Hugging Face's defaults."""
    settings: Settings
    """Media limits with their sources."""
    dtype: str
    """`bfloat16` or `float32`, as the weights are stored; half precision counts as bfloat16."""
    processor: Path | None = None
    """Folder of the processor, of a model whose family is `generic`."""

    @property
    def num_params(self) -> int:
        return sum(spec.num_params for spec in self.family.specs())

    @property
    def num_active_params(self) -> int:
        """Parameters that a token passes through; all of them without experts."""
        unused = (num * (kind.num_params - kind.num_used_params) for s in self.family.specs() for kind, num in s.layers)
        return self.num_params - sum(unused)


def read_hub_model(path: Path, cache: Path | None = None) -> HubModel:
    """The model whose `config.json` this is; media limits come from settings beside it.

    Types without a file in `families/`, and models with other sections than those, are of the family `generic`.

    Args:
        path: Of the file.
        cache: Where `generic` keeps what it reads of a model; None: in this process only.

    Raises:
        ConfigError: no such file, a model that dflop does not take, or one that transformers cannot read.
    """
    raw = read_object(path, "a model's config")
    kind = str(raw.get("model_type", ""))
    refuse_quantized(raw, str(path))
    if kind not in TYPES:
        return _generic(raw, path, cache)
    name, section = TYPES[kind]
    stated = raw.get(section) if section else raw
    if not isinstance(stated, dict):
        raise ConfigError(f"no `{section}` in a model of type `{kind}`", where=str(path))
    try:
        return _of_family(name, raw, stated, path)
    except ConfigError as error:
        if has_files(path.parent) and is_of_another_type(error):
            return _generic(raw, path, cache)
        raise


def _generic(raw: Mapping[str, Any], path: Path, cache: Path | None) -> HubModel:
    try:
        family = load_family(GENERIC, raw, {}, path.parent, cache)
    except ConfigError as error:
        where = str(path) if error.where.startswith("model.") else error.where
        raise ConfigError(error.what, where=where, hint=error.hint) from error
    assert isinstance(family, GenericFamily)
    media = family.facts.media
    notes = [f"no {medium.kind}: {medium.problem}" for medium in media if medium.problem]
    notes += [f"{of.kind} is planned for, not trained on: {of.untrained}" for of in media if of.untrained]
    return HubModel(family, raw, Settings({}, {}, tuple(notes)), _dtype(raw), path.parent)


def _of_family(name: str, raw: Mapping[str, Any], stated: Mapping[str, Any], path: Path) -> HubModel:
    config = _parsed(name, stated, path)
    hf_config = {"tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)), **_differing(config)}
    hf_config = json.loads(json.dumps(hf_config, default=str))
    bare = _family(name, hf_config, {}, path)
    settings = read_settings(path.parent, bare)
    return HubModel(_family(name, hf_config, settings.media, path), hf_config, settings, _dtype(raw, stated))


def _family(name: str, hf_config: Mapping[str, Any], media: Mapping[str, Any], path: Path) -> Family:
    """The family of a file; what it cannot be made of is told of the file, not of a configuration.

    Raises:
        ConfigError: it cannot.
    """
    try:
        family = load_family(name, hf_config, media)
        family.specs()  # what cannot be counted is refused here, and not where its parameters are asked for
        return family
    except ConfigError as error:
        where = f"{path}: {error.where.removeprefix('model.hf_config.')}"
        raise ConfigError(error.what, where=where, hint=error.hint) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Entries that no check knows of, and that nothing can be computed with.
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"cannot make a {name} of it ({words})", where=str(path)) from error


def _parsed(name: str, stated: Mapping[str, Any], path: Path) -> Any:
    check_depths(stated, f"{path}: ")
    for key, section in stated.items():
        if isinstance(section, Mapping):
            check_depths(section, f"{path}: {key}.")
    import transformers

    config_class: Any = transformers.CONFIG_MAPPING[name]
    try:
        return config_class.from_dict(dict(stated))
    except Exception as error:  # whatever a config class makes of a file it does not understand
        raise ConfigError(
            f"transformers {transformers.__version__} cannot read it: {' '.join(str(error).split())[:200]}",
            where=str(path),
            hint=f"it is read as a {config_class.__name__}",
        ) from error


def _differing(config: Any) -> dict[str, Any]:
    """Entries that differ from the defaults of their own class, sections included."""
    from transformers import PreTrainedConfig

    default, found = type(config)().to_dict(), {}
    for key, value in config.to_dict().items():
        section = getattr(config, key, None)
        if isinstance(section, PreTrainedConfig):
            if key.endswith("_config"):
                # transformers 4 wrote the model's name into its tower.
                kind = type(section).model_type if section.model_type == config.model_type else section.model_type
                found[key] = {"model_type": kind, **_differing(section)}
        elif key not in _NOISE and not key.startswith("_") and not key.endswith(("_token_id", "_token_index")):
            is_plain = key == "layer_types" and set(value or ()) <= {"full_attention"}
            if value != default.get(key) and not is_plain:
                found[key] = value
    return found


def _dtype(*stated: Mapping[str, Any]) -> str:
    sections = [s for raw in stated for s in (raw, raw.get("text_config") or {})]
    found = next((str(s[k]) for s in sections for k in ("dtype", "torch_dtype") if s.get(k)), "bfloat16")
    return "float32" if found.removeprefix("torch.") == "float32" else "bfloat16"
