"""Where every key of a configuration was written: file and line, or `--set`.

The loader keeps values and places apart, so that a configuration is plain values, equal however it was written. A key
that nobody wrote is a default; what is wrong with it is told at the section it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

Key = tuple[str, ...]
"""Names from the root down; elements of a list by their number."""

DEFAULT, SET = "default", "--set"


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file; no file: the command line."""

    file: str = ""
    line: int = 0
    num_above: int = 0
    """Names of the key that the file leaves out, because it holds one section."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else SET


class Origins:
    """Places of the keys of one configuration.

    Args:
        file: The file that a person named.
        places: Of every key that was written.
    """

    def __init__(self, file: Path, places: Mapping[Key, Place] | None = None) -> None:
        self.file = file
        self.places = dict(places or {})

    def where(self, *key: str) -> str:
        """`file:line: key` for an error; of a key that nobody wrote, the line of its section, if that was written."""
        for length in range(len(key), 0, -1):
            place = self.places.get(key[:length])
            if place is not None and not place.file:
                return f"{SET} {'.'.join(key)}"
            if place is not None:
                return f"{place}: {'.'.join(key[place.num_above :] or key)}"
        return f"{self.file}: {'.'.join(key)}"

    def of(self, *key: str) -> str:
        """`file:line`, `--set` or `default`."""
        for length in range(len(key), 0, -1):
            place = self.places.get(key[:length])
            if place is not None and (length == len(key) or not place.file):
                return str(place)
        return DEFAULT


def lines_of(text: str) -> dict[Key, int]:
    """Line of every key of a YAML text, from 1.

    Raises:
        YAMLError: the text is no YAML.
    """
    root = YAML(typ="safe", pure=True).compose(text)
    return dict(_walk(root, (), ())) if root is not None else {}


def _walk(node: Node, key: Key, above: tuple[Node, ...]) -> Iterator[tuple[Key, int]]:
    if any(node is other for other in above):
        return  # an alias of something it lies in
    if isinstance(node, SequenceNode):
        for number, element in enumerate(node.value):
            yield (*key, str(number)), element.start_mark.line + 1
            yield from _walk(element, (*key, str(number)), (*above, node))
    if isinstance(node, MappingNode):
        # A merged mapping comes first, so that the keys written here win.
        for name, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if name.value == "<<":
                yield from _merged(value, key, (*above, node))
                continue
            yield (*key, str(name.value)), name.start_mark.line + 1
            yield from _walk(value, (*key, str(name.value)), (*above, node))


def _merged(value: Node, key: Key, above: tuple[Node, ...]) -> Iterator[tuple[Key, int]]:
    merged = value.value if isinstance(value, SequenceNode) else [value]
    for mapping in reversed(merged):  # of several, the first wins
        yield from _walk(mapping, key, above)
