"""What a configuration may hold: text, finite numbers of 64 bits, lists, and mappings whose keys are text.

YAML can say more: dates, sets, bytes, a list within itself, numbers of a thousand digits, and by aliases of aliases
more values than memory holds. None of it means anything here, and all of it would be met again far from the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32
MAX_VALUES = 100_000
_MAX_SHOWN = 60
_NO_TEXT = re.compile(r"[\ud800-\udfff]")


class NotPlain(ValueError):
    """A value that no configuration holds.

    Args:
        key: Where it is.
        what: What is wrong with it.
    """

    def __init__(self, key: tuple[str, ...], what: str) -> None:
        super().__init__(what)
        self.key = key


def check_plain(value: Any) -> None:
    """Refuse what a configuration cannot hold, as YAML reads it.

    Raises:
        NotPlain: naming the key.
    """
    _check(value, (), [MAX_VALUES])


def _check(value: Any, key: tuple[str, ...], left: list[int]) -> None:
    left[0] -= 1
    if left[0] < 0:
        raise NotPlain(key, f"more than {MAX_VALUES} values, aliases counted as often as they are used")
    if len(key) > MAX_DEPTH:
        raise NotPlain(key[:3], f"nested more than {MAX_DEPTH} levels deep, or within itself")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise NotPlain(key, f"a key that is not text but a {type(name).__name__}: write it in quotes")
            if problem := _problem(name):
                raise NotPlain(key, f"a key with {problem}")
            _check(inner, (*key, shortened(name)), left)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(inner, (*key, str(number)), left)
    elif problem := _problem(value):
        raise NotPlain(key, problem)


def _problem(value: Any) -> str:
    """What is wrong with a single value; empty where nothing is."""
    if isinstance(value, str):
        found = _NO_TEXT.search(value)
        return f"the character U+{ord(found[0]):04X}, which is not allowed in text" if found else ""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**63 else "a number that does not fit 64 bits"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is no finite number"
    return f"a {type(value).__name__}, which is not supported here: write it in quotes if it is text"


def shortened(text: str) -> str:
    """Text as an error shows it."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
