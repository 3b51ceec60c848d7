"""Processor settings that ship with a model: the file that states a media limit, as transformers looks for it.

Each processor takes one source whole, the first that is there: its section of `processor_config.json` (transformers 5),
its own file (transformers 4), and for videos the file of pictures. What no source states has the processor's default;
that is a guess about the model, so whoever asks is told which limits are one. Entries that a family cannot follow are
told, too: sizes and pixels would differ from those the model was made with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError
from dflop.models.media import MediaRules, check_like
from dflop.records import parse_json

_WHOLE = "processor_config.json"
_IMAGES = "preprocessor_config.json"
_SOURCES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "image": (("image_processor",), (_IMAGES,)),
    "video": (("video_processor",), ("video_preprocessor_config.json", _IMAGES)),
    "audio": (("feature_extractor", "audio_processor"), (_IMAGES,)),
}
"""Media kind -> sections of `processor_config.json`, then files, in the order in which transformers 5.23 looks."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the settings in a model's folder mean for a family."""

    media: Mapping[str, Any]
    """Limits that are stated."""
    sources: Mapping[str, str]
    """The file and entry that state each of them."""
    not_followed: tuple[str, ...] = ()
    """Entries that say something else than the family does, a line each."""


def read_settings(folder: Path, family: MediaRules) -> Settings:
    """Limits and differences of a family, out of the settings in a model's folder.

    Args:
        folder: Where the model's `config.json` is.
        family: Bound to the model's config and no limits.

    Raises:
        ConfigError: a file of settings is no JSON object, or an entry is nothing that transformers takes.
    """
    media: dict[str, Any] = {}
    sources: dict[str, str] = {}
    not_followed: list[str] = []
    for kind in family.media_tokens:
        source, settings = _settings_of(folder, kind)
        for key, value, place in _stated(settings, source, family.settings.get(kind, {}), family):
            media[key], sources[key] = value, place
        not_followed += _differences(settings, source, family, kind)
    return Settings(media, sources, tuple(dict.fromkeys(not_followed)))


def section_of(kind: str) -> str:
    """Section of a media kind in `processor_config.json`."""
    return _SOURCES[kind][0][0]


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: The file.
        what: What it is, for errors.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"cannot read {what}: not a regular file", where=str(path))  # a FIFO would never end
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what}: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        found = "a list" if isinstance(content, list) else f"`{str(content)[:40]}`"
        raise ConfigError(f"{what} is an object, not {found}", where=str(path))
    return content


def _settings_of(folder: Path, kind: str) -> tuple[str, Mapping[str, Any]]:
    """(file and section, what they state) for a media kind; nothing where there is no file."""
    sections, files = _SOURCES[kind]
    if (whole := folder / _WHOLE).is_file():
        content = read_object(whole, "a processor's settings")
        section = next((name for name in sections if content.get(name) is not None), None)
        if section is not None:
            if not isinstance(content[section], dict):
                raise ConfigError(f"`{section}` is an object", where=str(whole))
            return f"{whole}: {section}.", content[section]
    for path in (folder / name for name in files):
        if path.is_file():
            return f"{path}: ", read_object(path, "a processor's settings")
    return "", {}


def _stated(
    settings: Mapping[str, Any], source: str, entries: Mapping[str, str], family: MediaRules
) -> Iterator[tuple[str, Any, str]]:
    """(limit, value, where it is stated)."""
    size = settings.get("size")
    edges = {f"size.{edge}": value for edge, value in size.items()} if isinstance(size, dict) else {}
    found = {entry: value for entry, value in {**edges, **settings}.items() if value is not None}
    for entry, key in entries.items():
        if entry in found:
            check_like(found[entry], family.media_defaults[key], f"{source}{entry}")
            yield key, found[entry], f"{source}{entry}"
        elif (
            size is not None
            and entry.startswith("size.")
            and not any(entries[other] == key for other in found if other in entries)
        ):
            raise ConfigError(
                f"`size` without `{entry.removeprefix('size.')}`, which transformers refuses",
                where=f"{source}size",
                hint="a mapping with shortest_edge and longest_edge, areas in pixels",
            )


def _differences(settings: Mapping[str, Any], source: str, family: MediaRules, kind: str) -> Iterator[str]:
    for entry, wanted in family.fixed_settings(kind).items():
        found = settings.get(entry)
        if found is not None and not _is_same(found, wanted):
            has = f"{family.name} has {wanted}" if wanted is not None else f"{family.name} has no such limit"
            yield f"{source}{entry} = {str(found)[:80]} is not supported: {has}"


def _is_same(found: Any, wanted: Any) -> bool:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return all(found.get(key) == value for key, value in wanted.items())
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_is_same, found, wanted))
    if isinstance(found, float) or isinstance(wanted, float):
        numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
        return numbers and math.isclose(found, wanted, rel_tol=1e-6)
    return bool(found == wanted)
