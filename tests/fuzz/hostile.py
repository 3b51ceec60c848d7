"""What strangers write: values, texts, documents and files, as hypothesis draws them.

Most come from something sound with a few places broken: text that is noise from end to end stops at the first check.
"""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.fuzz.target import Strategy

T = TypeVar("T", str, bytes)

TEXTS = st.text(max_size=12) | st.sampled_from((
    "", " ", "\0", "a\0b", "a\nb", "a\r\nb", "\x85", "\u2028", "\ud800", "x\udcff", "..", "../../etc/passwd", "/",
    "~", ".", "-", "--help", "-1", "0", "1e999", "nan", "1_000", "0x10", "٣", "true", "null", "*", "{a,b}", "{1..9}",
    "%s%n", "{{ 7 * 7 }}", "{% for %}", "$(id)", "'", '"', "\\", "a|b|c", "[red]x[/red]", "<script>alert(1)</script>",
    "</script>", "&amp;", "\x1b[31m", "\u202eabc", "<image>", "<|im_end|>", "http://a/b", "x" * 300, "é" * 200,
    "a/" * 300, "9" * 400, "x" * 5000,
))  # fmt: skip
"""Text that something reads as more than text."""
INTEGERS = st.integers(-3, 10) | st.sampled_from(
    (2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**18, 10**400)
)
FLOATS = st.floats() | st.sampled_from((0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf))
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS)


VALUES = st.one_of(
    SCALARS,
    st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=5),
    # What is deeper is written as text: to make it would be what fails.
    st.sampled_from([json.loads(a * n + "1" + b * n) for n in (3, 60, 150) for a, b in (("[", "]"), ('{"a":', "}"))]),
)
"""Anything that JSON or YAML can hold, and numbers that they cannot."""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(objects and lists of a document, a key of each)."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


@st.composite
def broken(draw: st.DrawFn, sound: Any, values: Strategy = VALUES) -> Any:
    """A document of objects and lists with one to three values replaced by `values`, gone, renamed or repeated."""
    document = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        found = list(_places(document))
        if not found:
            break
        node, key = found[draw(st.integers(0, len(found) - 1))]
        edit = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename", "wrap", "repeat")))
        if edit == "remove":
            del node[key]
        elif edit == "rename" and isinstance(node, dict):
            node[draw(TEXTS)] = node.pop(key)
        elif edit == "wrap":
            node[key] = draw(st.sampled_from(([node[key]], {"a": node[key]}, [[], node[key]], str(node[key]))))
        elif edit == "repeat" and isinstance(node, list):
            node += [copy.deepcopy(node[key]) for _ in range(draw(st.integers(1, 3)))]
        else:
            node[key] = copy.deepcopy(draw(values))  # the next edit may be in it
    return document


def one_broken(sound: Sequence[Any], values: Strategy = VALUES) -> Strategy:
    return st.sampled_from(sound).flatmap(lambda one: broken(one, values))


@st.composite
def _spliced(draw: st.DrawFn, sound: Sequence[T], noise: st.SearchStrategy[T]) -> T:
    """One of some files or texts, cut, written over, put into, in one to four places; its ends more often."""
    whole = draw(st.sampled_from(sound))
    for _ in range(draw(st.integers(1, 4))):
        last = max(0, len(whole) - 1)
        low, high = draw(st.sampled_from(((0, min(last, 200)), (0, last), (max(0, last - 200), last))))
        at, size, put_in = draw(st.integers(low, high)), draw(st.integers(1, 40)), draw(noise)
        edits = [(put_in, 0), (put_in, len(put_in)), (put_in, size), (whole[:0], size), (whole[:0], len(whole)),
                 (whole[at : at + size] * 3, size)]  # fmt: skip
        if isinstance(whole, bytes) and whole:
            edits.append((bytes([whole[at] ^ 1 << size % 8]), 1))
        middle, length = edits[draw(st.integers(0, len(edits) - 1))]
        whole = whole[:at] + middle + whole[at + length :]
    return whole


def broken_bytes(*sound: bytes) -> st.SearchStrategy[bytes]:
    words = (b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0" * 64, b"\n", b'"', b"{", b"]", b"PAR1", b"<")
    return _spliced(sound, st.binary(min_size=1, max_size=8) | st.sampled_from(words))


def broken_text(sound: Sequence[str], words: Sequence[str]) -> st.SearchStrategy[str]:
    """Some texts broken, with `words` put in as well as `TEXTS`."""
    return _spliced(sound, TEXTS | st.sampled_from(words))


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def broken_json(*sound: Any, values: Strategy = VALUES, end: bytes = b"") -> st.SearchStrategy[bytes]:
    """Files of JSON: sound ones with broken values or broken bytes, any value, and none; each with `end`."""
    odd = (b"", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xff\xfe")
    documents = (one_broken(sound, values) | VALUES).map(as_json) | st.sampled_from(odd)
    return documents.map(lambda text: text + end) | broken_bytes(*(as_json(one) + end for one in sound))
