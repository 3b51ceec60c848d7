"""LLaVA-format annotation files: random access by row, and one strict reading of what a row means.

Rows are read where they lie: a JSONL file is mapped and indexed by line start (8 bytes per row), so opening a file of
ten million rows holds 80 MB and any worker can read any row. A JSON list has no such index and is parsed once, whole.
A malformed row is a fact about that row, never about the file: reading it raises `BadSample`, whose reason becomes the
row's quarantine record.

Placeholders (`<image>`, `<video>`, `<audio>`) tie media to places in user turns, one each, in order. A row with fewer
placeholders than media gets the missing ones at the front of its first user turn, as LLaVA does; one with more is bad.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.errors import ConfigError, DataError

MEDIA_KINDS = ("image", "video", "audio")
PLACEHOLDER = re.compile(r"<(image|video|audio)>")

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}


class BadSample(ValueError):
    """A row that cannot be trained on.

    Args:
        reason: One line for the quarantine record.
        path: The media file at fault, relative to the media root; empty when the row itself is.
        sample_id: The row's id where it could be read.
    """

    def __init__(self, reason: str, *, path: str = "", sample_id: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.sample_id = sample_id


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A media file a row names; `path` is relative to the media root and not yet checked."""

    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class AnnotatedSample:
    """One well-formed row: its user turns hold exactly one placeholder per entry of `media`, in the same order."""

    sample_index: int
    sample_id: str
    turns: tuple[Turn, ...]
    media: tuple[MediaRef, ...]


class AnnotationFile:
    """Random access to the rows of a `.json` or `.jsonl` file, either one optionally `.gz`."""

    def __init__(
        self, path: Path, data: bytes | mmap.mmap, starts: npt.NDArray[np.int64], rows: list[Any] | None
    ) -> None:
        self.path = path
        self._data = data
        self._starts = starts
        self._rows = rows

    @classmethod
    def open(cls, path: Path) -> AnnotationFile:
        """Index the rows of `path` without judging them.

        Raises:
            ConfigError: the suffix is not one we read.
            DataError: the file cannot be read, or a `.json` file is not one list.
        """
        suffixes = [s for s in path.suffixes[-2:] if s != ".gz"]
        if suffixes[-1:] not in ([".json"], [".jsonl"]):
            raise ConfigError(
                f"annotation file {path.name} has an unknown suffix",
                where=str(path),
                hint="valid: .json, .jsonl, .json.gz, .jsonl.gz",
            )
        try:
            data = _content(path)
        except (OSError, EOFError) as error:
            raise DataError(f"annotation file cannot be read: {error}", where=str(path)) from error
        if suffixes[-1] == ".jsonl":
            return cls(path, data, _line_starts(data), None)
        try:
            rows = json.loads(data[:])
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"not a JSON document: {error}", where=str(path), hint="one object per line? name it .jsonl"
            ) from error
        if not isinstance(rows, list):
            raise DataError(f"expected a JSON list of rows, got {type(rows).__name__}", where=str(path))
        return cls(path, b"", np.empty(0, np.int64), rows)

    def __len__(self) -> int:
        return len(self._starts) if self._rows is None else len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """The object of row `index`, not yet interpreted.

        Raises:
            BadSample: the row is not a JSON object.
        """
        if self._rows is not None:
            row = self._rows[index]
        else:
            start = int(self._starts[index])
            stop = int(self._starts[index + 1]) if index + 1 < len(self._starts) else len(self._data)
            try:
                row = json.loads(self._data[start:stop].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise BadSample(f"row at byte {start} is not UTF-8: {error.reason}") from error
            except (ValueError, RecursionError) as error:
                raise BadSample(f"row at byte {start} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadSample(f"row is not a JSON object but a {type(row).__name__}")
        return row

    def sample(self, index: int) -> AnnotatedSample:
        """Row `index`, interpreted.

        Raises:
            BadSample: the row is malformed; the reason says how.
        """
        return parse_row(self.row(index), index)


def parse_row(row: dict[str, Any], index: int) -> AnnotatedSample:
    """Interpret one LLaVA-format object.

    Raises:
        BadSample: unknown role, wrong types, no assistant turn, or placeholders that do not fit the media.
    """
    sample_id = _printable(str(row.get("id", index)))
    try:
        turns = _turns(row)
        media = {kind: _paths(row, kind) for kind in MEDIA_KINDS}
        turns = _add_missing_placeholders(turns, media)
        queues = {kind: iter(paths) for kind, paths in media.items()}
        order = [kind for turn in turns if turn.role == "user" for kind in PLACEHOLDER.findall(turn.text)]
        refs = tuple(MediaRef(kind, next(queues[kind])) for kind in order)
    except BadSample as error:
        error.sample_id = sample_id
        raise
    return AnnotatedSample(index, sample_id, turns, refs)


def confine(media_root: Path, relative: str) -> Path:
    """Absolute path of a media file, refused unless it lies under `media_root` once symbolic links are followed.

    Raises:
        BadSample: absolute path, a path or link that leaves the root, or a name no file can have.
    """
    if os.path.isabs(relative):
        raise BadSample("absolute media path", path=relative)
    root = os.path.realpath(media_root)
    try:
        real = os.path.realpath(os.path.join(root, relative))
    except ValueError as error:
        raise BadSample(f"impossible media path: {error}", path=_printable(relative)) from error
    if os.path.commonpath([root, real]) != root:
        raise BadSample("media path leaves the media root", path=relative)
    return Path(real)


def _content(path: Path) -> bytes | mmap.mmap:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _line_starts(data: bytes | mmap.mmap) -> npt.NDArray[np.int64]:
    """Byte offsets of the lines that are not blank."""

    def scan() -> Iterator[int]:
        start = 0
        while start < len(data):
            newline = data.find(b"\n", start)
            stop = len(data) if newline < 0 else newline + 1
            if data[start:stop].strip():
                yield start
            start = stop

    return np.fromiter(scan(), dtype=np.int64)


def _turns(row: dict[str, Any]) -> tuple[Turn, ...]:
    raw = row.get("conversations", row.get("messages"))
    if raw is None:
        raise BadSample("no `conversations`")
    if not isinstance(raw, list):
        raise BadSample(f"`conversations` is not a list but a {type(raw).__name__}")
    turns = tuple(_turn(number, entry) for number, entry in enumerate(raw))
    if not turns:
        raise BadSample("conversation has no turns")
    spoken = [turn.role for turn in turns if turn.role != "system"]
    if "assistant" not in spoken:
        raise BadSample("conversation has no assistant turn")
    if spoken[0] == "assistant":
        raise BadSample("conversation starts with an assistant turn")
    return turns


def _turn(number: int, entry: object) -> Turn:
    if not isinstance(entry, dict):
        raise BadSample(f"turn {number} is not an object but a {type(entry).__name__}")
    speaker = entry.get("from", entry.get("role"))
    text = entry.get("value", entry.get("content"))
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadSample(f"turn {number} has unknown role {_short(speaker)}; valid: {', '.join(_ROLES)}")
    if not isinstance(text, str):
        raise BadSample(f"turn {number} has no text: its value is {_short(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(f"turn {number} is not valid Unicode: {error.reason} at character {error.start}") from error
    if role != "user" and (misplaced := PLACEHOLDER.search(text)):
        raise BadSample(f"turn {number} ({role}) holds {misplaced[0]}; media belong to user turns")
    return Turn(role, text)


def _paths(row: dict[str, Any], kind: str) -> tuple[str, ...]:
    paths: list[str] = []
    for key in (kind, f"{kind}s"):
        value = row.get(key)
        entries = [] if value is None else value if isinstance(value, list) else [value]
        for entry in entries:
            if not isinstance(entry, str) or not entry:
                raise BadSample(f"`{key}` names no file: {_short(entry)}")
            paths.append(entry)
    return tuple(paths)


def _add_missing_placeholders(turns: tuple[Turn, ...], media: dict[str, tuple[str, ...]]) -> tuple[Turn, ...]:
    found = Counter(kind for turn in turns if turn.role == "user" for kind in PLACEHOLDER.findall(turn.text))
    front = ""
    for kind, paths in media.items():
        if found[kind] > len(paths):
            raise BadSample(f"{found[kind]} <{kind}> placeholders for {len(paths)} {kind} files")
        front += f"<{kind}>\n" * (len(paths) - found[kind])
    first = _first_user(turns)
    return (*turns[:first], Turn("user", front + turns[first].text), *turns[first + 1 :])


def _first_user(turns: Sequence[Turn]) -> int:
    return next(i for i, turn in enumerate(turns) if turn.role == "user")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _printable(text: str) -> str:
    """Replace what cannot be stored as UTF-8 (lone surrogates from JSON escapes)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
