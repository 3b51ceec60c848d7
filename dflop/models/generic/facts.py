"""What plans need of a model, read from its classes and its processor once and kept in a file.

Reading takes seconds and imports torch and transformers; the file takes a millisecond. Its name is a hash of everything
that it follows from: the config, the processor's settings, the version of transformers and of this code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from dflop import files
from dflop.models.generic.values import Structure
from dflop.records import from_dict, parse_json, to_dict

T = TypeVar("T")

VERSION = 16
"""Raise when anything is read differently: kept files then no longer match."""
_SETTINGS = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip
"""Files of a folder that decide what its processor does, beside the tokenizer's vocabulary."""


@dataclass(frozen=True, slots=True)
class Medium:
    """What stands for items of one medium in a text, or why the model is not used with them."""

    kind: str
    """`image`, `video` or `audio`."""
    problem: str
    """Why it is refused; empty: it is not."""
    way: str = ""
    """How its rows are counted, see `tokens.py`."""
    pad: str = ""
    """The token that stands for a row of the encoder."""
    placeholder: str = ""
    """What the processor replaces in the text of a chat template."""
    needs_values: bool = False
    """Whether the processor looks at values: an item of its size is made to count it."""
    several: str = ""
    """How two items in a sample differ from each alone; empty: they do not."""
    form: str = ""
    """Form of its items' arrays, see `arrays.py`; empty: none that training knows."""
    patch: tuple[int, ...] = ()
    """Shape of a patch, where items are grids of these."""
    untrained: str = ""
    """Why its items are planned for and not trained on; empty: they are."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model without its classes."""

    key: str
    """Hash of what it was read from."""
    structure: Structure
    media: tuple[Medium, ...]
    untrained: str = ""
    """Why the model is planned for and not trained; empty: it is."""
    whole_samples: str = ""
    """Why ranks cannot share a sample; empty: they can."""
    merge_tokens: int = 0
    """As `ModuleSpec.merge_tokens`, of the tower for pictures and clips."""


def facts_of(hf_config: Mapping[str, Any], processor: Path, cache: Path | None = None) -> ModelFacts:
    """The facts of a model, read from its classes only where no file has them.

    Args:
        hf_config: Content of its `config.json`.
        processor: Folder with its processor and tokenizer.
        cache: Where files are kept; None: in this process only.

    Raises:
        ConfigError: dflop does not take such a model; the message names the key and what to do.
    """
    key = facts_key(hf_config, processor)
    return _facts(key, json.dumps(hf_config, sort_keys=True, default=str), processor, cache)


def facts_key(hf_config: Mapping[str, Any], processor: Path) -> str:
    """Hash of everything that the facts of a model follow from."""
    try:
        library = version("transformers")
    except PackageNotFoundError:
        library = ""
    return model_key(hf_config, processor, library)


def model_key(hf_config: Mapping[str, Any], processor: Path, library: str = "") -> str:
    """Hash of a model's config, its processor's settings, this code's version and that of transformers (empty: any)."""
    digest = hashlib.sha256(f"{VERSION} {library}\n".encode())
    digest.update(json.dumps(hf_config, sort_keys=True, default=str).encode())
    for name in _SETTINGS:
        if (path := processor / name).is_file():
            digest.update(f"\n{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=32)
def _facts(key: str, hf_config: str, processor: Path, cache: Path | None) -> ModelFacts:
    path = cache / f"{key}.json" if cache else None
    if path is not None and (known := kept(ModelFacts, path)) is not None:
        return known
    from dflop.models.generic.read_facts import read_facts

    found = read_facts(key, json.loads(hf_config), processor)
    if path is not None:
        with contextlib.suppress(OSError):  # it is read again
            keep(path, found)
    return found


def keep(path: Path, record: Any) -> None:
    """Write a record to a file of the cache; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, json.dumps(to_dict(record)))


def kept(of: type[T], path: Path) -> T | None:
    """The record in a file of the cache; None where there is no file, or a damaged one."""
    try:
        return from_dict(of, parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
