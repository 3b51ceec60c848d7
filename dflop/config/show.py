"""A resolved configuration for people and for programs: every value beside the place it comes from.

Passwords and keys, such as setup lines of a cluster may export, are shown as `***`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node

from dflop.config.load import Loaded, dump_yaml
from dflop.config.places import Key
from dflop.config.sections import Config
from dflop.errors import HIDDEN, names_secret, redacted

_COLUMN = 44
"""Comments begin here where values leave room."""


class ShownKey(NamedTuple):
    """One key of a resolved configuration."""

    key: str
    value: Any
    origin: str
    """`file:line`, `--set` or `default`."""


def shown_config(config: Config) -> str:
    """The resolved configuration as YAML; without secrets in it, it reads back to an equal value."""
    return dump_yaml(_dumped(config), width=80)


def annotated(loaded: Loaded) -> str:
    """As `shown_config`, with the origin of every value as a comment."""
    text = shown_config(loaded.config)
    lines = text.splitlines()
    for key, number in _single_lines(YAML(typ="safe", pure=True).compose(text), ()):
        lines[number] = f"{lines[number]:<{_COLUMN}}  # {loaded.origins.of(*key)}"
    return "\n".join(lines) + "\n"


def shown_keys(loaded: Loaded) -> list[ShownKey]:
    """Every key with a value of its own; lists are values."""
    return [
        ShownKey(".".join(key), value, loaded.origins.of(*key)) for key, value in _leaves(_dumped(loaded.config), ())
    ]


def _dumped(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = _without_secrets(config.model_dump(mode="json"))
    return values


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: HIDDEN if names_secret(name) and isinstance(inner, str) and inner else _without_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return redacted(value) if isinstance(value, str) else value


def _leaves(values: Mapping[str, Any], above: Key) -> Iterator[tuple[Key, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _single_lines(node: Node, above: Key) -> Iterator[tuple[Key, int]]:
    """Keys with a value of their own, and the line, from 0, whose end can take a comment."""
    if not isinstance(node, MappingNode):
        return
    for name, value in node.value:
        key, line = (*above, str(name.value)), name.start_mark.line
        if isinstance(value, MappingNode) and value.value:
            yield from _single_lines(value, key)
        elif value.start_mark.line > line or value.end_mark.line == line:
            # A list below its key, or a value that ends where it begins: a long text over several lines has no room.
            yield key, line
