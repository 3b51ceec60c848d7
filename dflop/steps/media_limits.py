"""Media limits of a configuration, every one of them, with the place each comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dflop.config import Config, Loaded
from dflop.errors import ConfigError
from dflop.run.directory import family_of


def with_every_limit(loaded: Loaded) -> Loaded:
    """The configuration with the family's media limits where nobody states one, if a family can be made."""
    limits = _limits(loaded.config)
    model = loaded.config.model.model_copy(update={"media": dict(limits)})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model})) if limits else loaded


def limit_lines(loaded: Loaded) -> Iterator[str]:
    """Every limit, its value and its origin, a line each."""
    for key, value in _limits(loaded.config).items():
        stated = key in loaded.config.model.media
        yield f"model.media.{key}: {value}, {loaded.origins.of('model', 'media', key) if stated else 'default'}"


def stated_limits(config: Config) -> dict[str, list[Any]]:
    """Limit -> [value, `model.media` or `default`], for the record of a profile."""
    return {
        key: [value, "model.media" if key in config.model.media else "default"]
        for key, value in _limits(config).items()
    }


def _limits(config: Config) -> Mapping[str, Any]:
    try:
        return family_of(config).media
    except ConfigError:  # told by `config validate`
        return {}
