"""JSON objects, and where they are in a list of them without keeping any."""

from __future__ import annotations

import codecs
import contextlib
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import BadSample
from dflop.data.row_keys import CONVERSATION_KEYS
from dflop.errors import DataError

_WINDOW_BYTES = 2**22
_MAX_ELEMENT_BYTES = 2**28
_NOT_BLANK = re.compile(r"[^ \t\n\r]|\Z")
_HEAD_BYTES = 2**12
_MAX_OBJECT_BYTES = 2**31
_VALID = "valid: a list of rows, an object of such lists, or one object per line"
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


def lists_of(data: bytes | mmap.mmap, path: Path) -> dict[str, bytes | mmap.mmap]:
    """The rows of a document that is no list, as JSON Lines, by the name of their list in it.

    One that is JSON Lines already, since its first line is a row, or an object that others follow, has no name; of a
    list, nothing is returned.

    Raises:
        DataError: it is none of these, or too large to be parsed as a whole.
    """
    if not (text := (head := data[:_HEAD_BYTES]).removeprefix(codecs.BOM_UTF8).lstrip()).startswith(b"{"):
        return {}
    start = len(head) - len(text)
    stop = end if (end := data.find(b"\n", start)) >= 0 else len(data)
    with contextlib.suppress(ValueError, RecursionError):  # it may go on, or be damaged
        if json.loads(data[start:stop]).keys() & set(CONVERSATION_KEYS) or data[stop : stop + _HEAD_BYTES].strip():
            return {"": data}
    try:
        if len(data) > _MAX_OBJECT_BYTES:
            raise ValueError(f"an object of more than {_MAX_OBJECT_BYTES} bytes")
        found = json.loads(bytes(data).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a JSON document: {error}", where=str(path), hint=_VALID) from error
    lists = {
        name: rows for name, rows in found.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    if not lists:
        raise DataError("an object without a list of rows", where=str(path), hint=_VALID)
    return {name: b"".join(json.dumps(row).encode() + b"\n" for row in rows) for name, rows in lists.items()}


def element_spans(data: bytes | mmap.mmap, path: Path) -> npt.NDArray[np.int64]:
    """[start, stop) in bytes of every element of the JSON list that `data` is, of shape (num_elements, 2).

    Elements are parsed to find their ends, in windows, so memory is bounded by the longest of them.

    Raises:
        DataError: not a JSON document, or not a list.
    """
    try:
        return np.fromiter((edge for span in _spans(data) for edge in span), np.int64).reshape(-1, 2)
    except (ValueError, RecursionError) as error:
        raise DataError(str(error), where=str(path), hint=_VALID) from error


def _spans(data: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
    at, size_bytes, is_first = _after_opening(data), _WINDOW_BYTES, True
    parse = json.JSONDecoder().raw_decode
    while True:
        # One character per byte: what is structure in JSON is ASCII, and never part of a longer UTF-8 character.
        begin, text = at, data[at : at + size_bytes].decode("latin-1")
        try:
            while True:
                start = _skip(text, at - begin)
                if is_first and text[start] == "]":
                    return _refuse_more(data, begin + start + 1)
                _, stop = parse(text, start)
                end = _skip(text, stop)
                if text[end] not in ",]":
                    raise ValueError(f"expected a comma, not {text[end]!r} after it")
                yield begin + start, begin + stop
                if text[end] == "]":
                    return _refuse_more(data, begin + end + 1)
                at, size_bytes, is_first = begin + end + 1, _WINDOW_BYTES, False
        except (ValueError, IndexError) as error:
            # The element may go on behind the window: read from its start, more if it had a window of its own.
            if begin + len(text) == len(data) or size_bytes >= _MAX_ELEMENT_BYTES:
                reason = "file ends within the list" if isinstance(error, IndexError) else getattr(error, "msg", error)
                raise ValueError(f"not a JSON document: row at byte {at}: {reason}") from error
            if at == begin:
                size_bytes *= 2


def _after_opening(data: bytes | mmap.mmap) -> int:
    begin = len(codecs.BOM_UTF8) if data[:3] == codecs.BOM_UTF8 else 0
    text = data[begin : begin + _WINDOW_BYTES].decode("latin-1")
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        raise ValueError(f"expected a list of rows, not {text[at : at + 20] or 'an empty file'!r}")
    return begin + at + 1


def _refuse_more(data: bytes | mmap.mmap, at: int) -> None:
    for start in range(at, len(data), _WINDOW_BYTES):
        if data[start : start + _WINDOW_BYTES].strip():
            raise ValueError(f"not a JSON document: more data after the list, at byte {at}")


def _skip(text: str, at: int) -> int:
    """Position of the first character from `at` that is not blank, or the end."""
    found = _NOT_BLANK.search(text, at)
    return found.start() if found else len(text)
