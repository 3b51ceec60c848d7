"""Numbers that people give, as arrays; what is none, or cannot be, is refused by its name and place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.errors import ConfigError

_NUMBERS = (int, float, np.integer, np.floating)


def check_positive(name: str, value: Any, where: str) -> None:
    """Refuse what is no positive whole number.

    Raises:
        ConfigError: naming the argument.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, must be a positive whole number", where=where)


def whole_numbers(name: str, values: Iterable[Any], where: str) -> npt.NDArray[np.int64]:
    """`[N]` whole numbers from 0; floats without a fraction are taken.

    Raises:
        ConfigError: naming the argument and the first value that is none.
    """
    found = _numbers(name, values, "must be a whole number", where)
    if found.dtype.kind == "f":
        _refuse_first(name, found, ~(np.isfinite(found) & (found == np.floor(found))), "must be a whole number", where)
    _refuse_first(name, found, (found < 0) | (found >= 2.0**63), "must be from 0 and below 2^63", where)
    return found.astype(np.int64)


def finite_numbers(name: str, values: Iterable[Any], where: str) -> npt.NDArray[np.float64]:
    """`[N]` numbers from 0.

    Raises:
        ConfigError: naming the argument and the first value that is none.
    """
    found = _numbers(name, values, "must be a number", where).astype(np.float64)
    _refuse_first(name, found, ~np.isfinite(found) | (found < 0), "must be finite and not negative", where)
    return found


def _numbers(name: str, values: Iterable[Any], why: str, where: str) -> np.ndarray[Any, Any]:
    """An array of numbers, of a list of them or of what is an array already."""
    if not hasattr(values, "__array__"):
        values = list(values)
        kinds = {kind for kind in set(map(type, values)) if issubclass(kind, bool) or not issubclass(kind, _NUMBERS)}
        if kinds:
            bad = next(i for i, value in enumerate(values) if type(value) in kinds)
            raise ConfigError(f"{name} of sample {bad} is {values[bad]!r}, {why}", where=where)
    found = np.asarray(values)
    if found.ndim != 1:
        raise ConfigError(f"{name} has shape {found.shape}, there must be one number per sample", where=where)
    if len(found) and found.dtype.kind not in "iuf":
        raise ConfigError(f"{name} of sample 0 is {found.tolist()[0]!r}, {why}", where=where)
    return found


def _refuse_first(name: str, values: np.ndarray[Any, Any], is_bad: np.ndarray[Any, Any], why: str, where: str) -> None:
    if is_bad.any():
        bad = int(np.flatnonzero(is_bad)[0])
        raise ConfigError(f"{name} of sample {bad} is {values[bad]}, {why}", where=where)
