"""JSON objects, and where they are in a document of them without keeping any."""

from __future__ import annotations

import codecs
import contextlib
import json
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import BadSample
from dflop.data.keys import CONVERSATION_KEYS
from dflop.errors import DataError

_WINDOW_BYTES = 2**22
_MAX_ELEMENT_BYTES = 2**28
_NOT_BLANK = re.compile(r"[^ \t\n\r]|\Z")
_NOT_BLANK_BYTE = re.compile(rb"[^ \t\n\r]")
_SPEAKERS = {"from", "role", "user"}


def parse_object(content: bytes, what: str) -> dict[str, Any]:
    """A row from its bytes.

    Args:
        content: One JSON object, or the list of turns that is its conversation.
        what: Subject of the error message.

    Raises:
        BadSample: it is anything else.
    """
    try:
        row = json.loads(content.decode("utf-8-sig"))  # files joined by hand have marks in their middle
    except UnicodeDecodeError as error:
        raise BadSample(f"{what} is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise BadSample(f"{what} is not JSON: {error}") from error
    if isinstance(row, list) and row and all(isinstance(turn, dict) and turn.keys() & _SPEAKERS for turn in row):
        return {"conversations": row}
    if not isinstance(row, dict):
        raise BadSample(f"{what} is not a JSON object but a {type(row).__name__}")
    return row


def holds_lines(data: bytes | mmap.mmap) -> bool:
    """Whether a document is one object per line: its first line is an object, and a row or not the only line."""
    begin = _next(data, _after_mark(data))
    newline = data.find(b"\n", begin)
    stop = len(data) if newline < 0 else newline
    if data[begin : begin + 1] != b"{" or stop - begin > _MAX_ELEMENT_BYTES:
        return False
    try:
        first = json.loads(data[begin:stop])
    except (ValueError, RecursionError):
        return False
    return _next(data, stop) < len(data) or bool(first.keys() & set(CONVERSATION_KEYS))


def element_spans(data: bytes | mmap.mmap, path: Path) -> Mapping[str, npt.NDArray[np.int64]]:
    """[start, stop) in bytes of every element of the list that a document is, or of each list of objects inside it.

    Elements are parsed to find their ends, in windows, so memory is bounded by the longest of them.

    Returns:
        Shape (num_elements, 2), by the list's name; the document itself has none.

    Raises:
        DataError: not a JSON document, or one without a list of objects.
    """
    try:
        begin = _next(data, _after_mark(data))
        if data[begin : begin + 1] == b"{":
            found, stop = _lists_of_object(data, begin)
        else:
            _expect(data, begin, "[", "a list of rows")
            spans, stop = _collected(data, begin)
            found = {"": spans}
        if (more := _next(data, stop)) < len(data):
            raise ValueError(f"not a JSON document: more data after its end, at byte {more}")
    except (ValueError, RecursionError) as error:
        raise DataError(str(error), where=str(path), hint="valid: a list of rows, or one object per line") from error
    return found


def _lists_of_object(data: bytes | mmap.mmap, begin: int) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
    found: dict[str, npt.NDArray[np.int64]] = {}
    at = _next(data, begin + 1)
    while data[at : at + 1] != b"}":
        name, at = _value(data, at)
        at = _next(data, _expect(data, _next(data, at), ":", "a value after its name"))
        if data[at : at + 1] == b"[" and data[(first := _next(data, at + 1)) : first + 1] == b"{":
            found[str(name).encode("latin-1").decode()], at = _collected(data, at)
        else:
            _, at = _value(data, at)
        at = _next(data, at)
        if data[at : at + 1] != b"}":
            at = _next(data, _expect(data, at, ",", "a comma"))
    if not found:
        raise ValueError("an object without a list of rows")
    return found, at + 1


def _collected(data: bytes | mmap.mmap, begin: int) -> tuple[npt.NDArray[np.int64], int]:
    """Spans of the elements of the list at `begin`, and where it ends."""
    edges = np.fromiter(_edges(data, begin + 1), np.int64)
    return edges[:-1].reshape(-1, 2), int(edges[-1])


def _edges(data: bytes | mmap.mmap, at: int) -> Iterator[int]:
    """Start and stop of every element, and then the end of the list."""
    size_bytes, is_first = _WINDOW_BYTES, True
    parse = json.JSONDecoder().raw_decode
    while True:
        # One character per byte: what is structure in JSON is ASCII, and never part of a longer UTF-8 character.
        begin, text = at, data[at : at + size_bytes].decode("latin-1")
        try:
            while True:
                start = _skip(text, at - begin)
                if is_first and text[start] == "]":
                    yield begin + start + 1
                    return
                _, stop = parse(text, start)
                end = _skip(text, stop)
                if text[end] not in ",]":
                    raise ValueError(f"expected a comma, not {text[end]!r} after it")
                yield begin + start
                yield begin + stop
                at, size_bytes, is_first = begin + end + 1, _WINDOW_BYTES, False
                if text[end] == "]":
                    yield at
                    return
        except (ValueError, IndexError) as error:
            # The element may go on behind the window: read from its start, more if it had a window of its own.
            if begin + len(text) == len(data) or size_bytes >= _MAX_ELEMENT_BYTES:
                reason = "file ends within the list" if isinstance(error, IndexError) else getattr(error, "msg", error)
                raise ValueError(f"not a JSON document: row at byte {at}: {reason}") from error
            if at == begin:
                size_bytes *= 2


def _value(data: bytes | mmap.mmap, at: int) -> tuple[object, int]:
    """The value at `at`, and where it ends."""
    for size_bytes in (_WINDOW_BYTES, _MAX_ELEMENT_BYTES):
        text = data[at : at + size_bytes].decode("latin-1")
        with contextlib.suppress(ValueError):
            value, stop = json.JSONDecoder().raw_decode(text)
            if stop < len(text):  # otherwise it may go on behind the window
                return value, at + stop
    raise ValueError(f"not a JSON document: no value at byte {at}")


def _expect(data: bytes | mmap.mmap, at: int, sign: str, what: str) -> int:
    """Position behind `sign`, which is to stand at `at`."""
    if (found := data[at : at + 1].decode("latin-1")) != sign:
        shown = data[at : at + 20].decode("utf-8", "replace") if found else "the end"
        raise ValueError(f"not a JSON document: expected {what} at byte {at}, not {shown!r}")
    return at + 1


def _after_mark(data: bytes | mmap.mmap) -> int:
    return len(codecs.BOM_UTF8) if data[:3] == codecs.BOM_UTF8 else 0


def _next(data: bytes | mmap.mmap, at: int) -> int:
    """Position of the first byte from `at` that is not blank, or the end."""
    found = _NOT_BLANK_BYTE.search(data, at)
    return found.start() if found else len(data)


def _skip(text: str, at: int) -> int:
    """Position of the first character from `at` that is not blank, or the end."""
    found = _NOT_BLANK.search(text, at)
    return found.start() if found else len(text)
