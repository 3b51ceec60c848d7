"""How rows are written that another program's index describes, and rows that name a file and say what it shows."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.data.annotations import MEDIA_KINDS, BadSample
from dflop.data.media_value import EXTENSIONS

_KIND = {extension: kind for kind, extensions in EXTENSIONS.items() for extension in extensions}
_FILE_KEY = re.compile(r"(.+_)?(file_?names?|file|file_?path|path)")


@dataclass(frozen=True, slots=True)
class RowMapping:
    """What is done to the rows of a file before they are read."""

    list_name: str = ""
    """Name of the list with the rows, in a JSON object of lists."""
    columns: tuple[tuple[str, str], ...] = ()
    """(our key, theirs): with any, no other column is read."""
    tags: tuple[tuple[str, str], ...] = ()
    """A turn's keys of `role` and `content`, and its names of speakers: (our word, theirs)."""
    names_files: bool = False
    """Whether a column such as `file_name` names the media of its row, and another is their caption."""

    def apply(self, row: dict[str, Any], ignored_keys: Collection[str]) -> dict[str, Any]:
        """A row as `read_row` takes it.

        Raises:
            BadSample: several columns name media of a kind.
        """
        if self.columns:
            row = {ours: row.get(theirs) for ours, theirs in (("id", "id"), *self.columns)}
            row["conversations"] = self._turns(row.get("conversations"))
        return _with_files(row, ignored_keys) if self.names_files else row

    def _turns(self, turns: object) -> object:
        tags = dict(self.tags)
        if not tags or not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            return turns
        words = {theirs: ours for ours, theirs in self.tags}
        role, content = tags.get("role", "from"), tags.get("content", "value")
        return [
            {"role": words.get(str(turn.get(role)), turn.get(role)), "content": turn.get(content)} for turn in turns
        ]


def mapping_of(path: Path) -> RowMapping | None:
    """How rows are written in a file of this name: those of `metadata.*` and of tables of text name files."""
    name = path.name.lower()
    is_table = ".csv" in name or ".tsv" in name
    return RowMapping(names_files=True) if is_table or name.startswith("metadata.") else None


def _with_files(row: dict[str, Any], ignored_keys: Collection[str]) -> dict[str, Any]:
    media: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for key, value in row.items():
        names = [name for name in (value if isinstance(value, list) else [value]) if name]
        kinds = {kind_of(name) for name in names}
        if (
            key in ignored_keys
            or not (_FILE_KEY.fullmatch(key) or key in MEDIA_KINDS)
            or len(kinds) != 1
            or None in kinds
        ):
            continue
        (kind,) = kinds
        if kind in media and media[str(kind)] != names:
            raise BadSample(f"`{keys[str(kind)]}` and `{key}` both name {kind} files; ignore one: dataset.ignored_keys")
        media[str(kind)], keys[str(kind)] = names, key
    rest = {key: value for key, value in row.items() if key not in keys.values()}
    return {**rest, **{f"{kind}s": names for kind, names in media.items()}}


def kind_of(name: object) -> str | None:
    """Kind of media that a file of this name is."""
    return _KIND.get(name.lower().rpartition(".")[2]) if isinstance(name, str) and "." in name else None
