"""JSON objects, and where they are in a list of them without keeping any."""

from __future__ import annotations

import codecs
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import BadSample
from dflop.errors import DataError

_WINDOW_BYTES = 2**22
_MAX_ELEMENT_BYTES = 2**28
_NOT_BLANK = re.compile(r"[^ \t\n\r]|\Z")
_STARTS = {"{": "dict", '"': "str", "": "nothing"}


def parse_object(content: bytes, what: str) -> dict[str, Any]:
    """A row from its bytes.

    Args:
        content: One JSON object.
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
    if not isinstance(row, dict):
        raise BadSample(f"{what} is not a JSON object but a {type(row).__name__}")
    return row


def element_spans(data: bytes | mmap.mmap, path: Path) -> npt.NDArray[np.int64]:
    """[start, stop) in bytes of every element of the JSON list that `data` is, of shape (num_elements, 2).

    Elements are parsed to find their ends, in windows, so memory is bounded by the longest of them.

    Raises:
        DataError: not a JSON document, or not a list.
    """
    try:
        return np.fromiter((edge for span in _spans(data) for edge in span), np.int64).reshape(-1, 2)
    except (ValueError, RecursionError) as error:
        raise DataError(str(error), where=str(path), hint="one object per line? name it .jsonl") from error


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
        raise ValueError(f"expected a JSON list of rows, got {_STARTS.get(text[at : at + 1], text[at : at + 20])}")
    return begin + at + 1


def _refuse_more(data: bytes | mmap.mmap, at: int) -> None:
    for start in range(at, len(data), _WINDOW_BYTES):
        if data[start : start + _WINDOW_BYTES].strip():
            raise ValueError(f"not a JSON document: more data after the list, at byte {at}")


def _skip(text: str, at: int) -> int:
    """Position of the first character from `at` that is not blank, or the end."""
    found = _NOT_BLANK.search(text, at)
    return found.start() if found else len(text)
