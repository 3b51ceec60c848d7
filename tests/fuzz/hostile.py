"""What strangers write: values, texts, documents and files, as hypothesis draws them.

Most come from something sound with a few places broken: text that is noise from end to end stops at the first check.
Every example is plain (numbers, text, bytes, lists, objects), so that it can be written down and read back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Path_ = tuple[Any, ...]

TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        (
            "", " ", "\0", "a\0b", "a\nb", "a\r\nb", "\x85", "\u2028", "\ud800", "x\udcff", "..", "../../etc/passwd",
            "/", "/dev/null",
            "~", ".", "-", "--help", "-1", "0", "1e999", "nan", "inf", "1_000", "0x10", "٣", "true", "null", "*",
            "{a,b}", "{1..9}",
            "%s%n", "{}", "{{ 7 * 7 }}", "{% for %}", "$HOME", "`id`", "$(id)", "'", '"', "a'b\"c", "\\", "a|b|c",
            "[red]x[/red]", "[/]",
            "<script>alert(1)</script>", "</script>", "<!--", "]]>", "&amp;", "\x1b[31m", "\u202eabc", "<image>",
            "<|im_end|>",
            "http://a/b", "file:///etc/passwd", "data:,", "x" * 300, "é" * 200, "a/" * 300, "9" * 400, "x" * 5000,
        )
    ),
)  # fmt: skip
"""Text that something reads as more than text."""

INTEGERS = st.one_of(
    st.integers(-3, 10),
    st.sampled_from(
        (2**15, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**18, 10**30, 10**400)
    ),
)
FLOATS = st.one_of(st.floats(), st.sampled_from((0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)))
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS)


def nested(depth: int, kind: str = "list") -> Any:
    """A value inside a value inside a value."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


DEPTHS = st.sampled_from((3, 60, 150))
"""Deeper ones are written as text: making them here would be what fails."""
VALUES = st.one_of(
    SCALARS,
    st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=5),
    st.builds(nested, DEPTHS, st.sampled_from(("list", "object"))),
)
"""Anything that JSON or YAML can hold, and numbers that they cannot."""


def places(value: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Where every value of a document is, its own place left out."""
    pairs: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    for key, inner in pairs:
        yield (*above, key)
        yield from places(inner, (*above, key))


@st.composite
def broken(
    draw: st.DrawFn, sound: Any, values: st.SearchStrategy[Any] = VALUES, *, max_edits: int = 3, within: Path_ = ()
) -> Any:
    """A document of objects and lists with some values replaced, gone, renamed or repeated.

    Args:
        draw: Hypothesis gives it.
        sound: The document.
        values: What takes the place of others.
        max_edits: Places that are broken.
        within: Only places below this one.
    """
    document = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, max_edits))):
        found = [place for place in places(document) if place[: len(within)] == within and place != within]
        if not found:
            break
        *above, key = draw(st.sampled_from(found))
        node = document
        for step in above:
            node = node[step]
        edit = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename", "wrap", "repeat")))
        if edit == "remove":
            del node[key]
        elif edit == "rename" and isinstance(node, dict):
            node[draw(TEXTS)] = node.pop(key)
        elif edit == "wrap":
            node[key] = draw(st.sampled_from(([node[key]], {"a": node[key]}, [[], node[key]], str(node[key]))))
        elif edit == "repeat" and isinstance(node, list):
            node += [copy.deepcopy(node[key])] * draw(st.integers(1, 3))
        else:
            node[key] = draw(values)
    return document


def _cut(data: bytes, at: int, size: int, noise: bytes) -> bytes:
    return data[:at]


def _flip(data: bytes, at: int, size: int, noise: bytes) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << size % 8]) + data[at + 1 :] if data else noise


def _over(data: bytes, at: int, size: int, noise: bytes) -> bytes:
    return data[:at] + noise + data[at + len(noise) :]


def _insert(data: bytes, at: int, size: int, noise: bytes) -> bytes:
    return data[:at] + noise + data[at:]


def _delete(data: bytes, at: int, size: int, noise: bytes) -> bytes:
    return data[:at] + data[at + size :]


def _repeat(data: bytes, at: int, size: int, noise: bytes) -> bytes:
    return data[:at] + data[at : at + size] * 3 + data[at + size :]


EDITS: Mapping[str, Callable[[bytes, int, int, bytes], bytes]] = {
    "cut": _cut, "flip": _flip, "over": _over, "insert": _insert, "delete": _delete, "repeat": _repeat,
}  # fmt: skip
NOISE = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from(
        (b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0" * 64, b"\n", b'"', b"{", b"]", b"PAR1", b"<")
    ),
)


@st.composite
def broken_bytes(draw: st.DrawFn, sound: Sequence[bytes], *, max_edits: int = 4) -> bytes:
    """One of some files with bytes flipped, cut, written over, put in between; headers and footers more often.

    Args:
        draw: Hypothesis gives it.
        sound: The files.
        max_edits: Places that are broken.
    """
    data = draw(st.sampled_from(sound))
    for _ in range(draw(st.integers(1, max_edits))):
        edit = EDITS[draw(st.sampled_from(sorted(EDITS)))]
        last = max(0, len(data) - 1)
        region = draw(st.sampled_from(("head", "any", "tail")))
        low, high = {"head": (0, min(last, 200)), "any": (0, last), "tail": (max(0, last - 200), last)}[region]
        data = edit(data, draw(st.integers(low, high)), draw(st.integers(1, 40)), draw(NOISE))
    return data


@st.composite
def broken_text(draw: st.DrawFn, sound: Sequence[str], words: Sequence[str] = ()) -> str:
    """One of some texts with characters and words cut out, put in, or in another order.

    Args:
        draw: Hypothesis gives it.
        sound: The texts.
        words: What is put in, besides `TEXTS`.
    """
    text = draw(st.sampled_from(sound))
    inserts = TEXTS if not words else TEXTS | st.sampled_from(words)
    for _ in range(draw(st.integers(1, 4))):
        at, size = draw(st.integers(0, len(text))), draw(st.integers(0, 30))
        edit = draw(st.sampled_from(("insert", "replace", "delete", "cut", "repeat")))
        if edit == "cut":
            text = text[:at]
        elif edit == "repeat":
            text = text[:at] + text[at : at + size] * 2 + text[at + size :]
        else:
            text = text[:at] + (draw(inserts) if edit != "delete" else "") + text[at + (edit != "insert") * size :]
    return text
