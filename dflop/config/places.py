"""Where every key of a configuration was written: file and line, or `--set`.

The loader keeps values and places apart, so that a configuration is plain values, equal however it was written. A key
that nobody wrote is a default; what is wrong with it is told at the section it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

Key = tuple[str, ...]
"""Names from the root down; elements of a list by their number."""

DEFAULT, SET = "default", "--set"
MAX_CHARACTERS, MAX_NODES = 10_000_000, 500_000
"""Limits of one file. A mixture of 50,000 datasets has 250,000 values."""


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


def lines_of(root: Node | None) -> dict[Key, int]:
    """Line of every key of a YAML text that was `composed`, from 1."""
    return dict(_walk(root, ())) if root is not None else {}


def composed(text: str, reader: YAML) -> Node | None:
    """The nodes of a YAML text, of which there are not too many: aliases of aliases make billions of a few lines.

    Args:
        text: Of one document.
        reader: What will construct values of the nodes.

    Raises:
        YAMLError: the text is no YAML, or too large, too deep, or an alias lies in what it stands for.
    """
    if len(text) > MAX_CHARACTERS:
        raise YAMLError(f"more than {MAX_CHARACTERS} characters")
    try:
        root: Node | None = reader.compose(text)
        num_nodes = _num_nodes(root, {}) if root is not None else 0
    except RecursionError:
        raise YAMLError("nested too deeply") from None
    if num_nodes > MAX_NODES:
        raise YAMLError(f"more than {MAX_NODES} values, aliases (*name) written out")
    return root


def _num_nodes(node: Node, known: dict[int, int | None]) -> int:
    """Nodes of a tree in which every alias is written out."""
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise YAMLError("an alias (*name) refers to itself")
        return count
    known[id(node)] = None
    inner = node.value if isinstance(node, SequenceNode | MappingNode) else ()
    children = (child for entry in inner for child in (entry if isinstance(entry, tuple) else (entry,)))
    known[id(node)] = total = 1 + sum(_num_nodes(child, known) for child in children)
    return total


def _walk(node: Node, key: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, SequenceNode):
        for number, element in enumerate(node.value):
            yield (*key, str(number)), element.start_mark.line + 1
            yield from _walk(element, (*key, str(number)))
    if isinstance(node, MappingNode):
        # A merged mapping comes first, so that the keys written here win.
        for name, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if name.value == "<<":
                yield from _merged(value, key)
                continue
            yield (*key, str(name.value)), name.start_mark.line + 1
            yield from _walk(value, (*key, str(name.value)))


def _merged(value: Node, key: Key) -> Iterator[tuple[Key, int]]:
    merged = value.value if isinstance(value, SequenceNode) else [value]
    for mapping in reversed(merged):  # of several, the first wins
        yield from _walk(mapping, key)
