"""One generic mapping between records and plain nested dicts; JSON, Parquet and DuckDB all go through it."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Hashable
from typing import Any, TypeVar

T = TypeVar("T")


def to_dict(record: Any) -> dict[str, Any]:
    """Plain nested dict of a record: what JSON, Parquet and DuckDB see."""
    return dataclasses.asdict(record)


def from_dict(cls: type[T], data: dict[str, Any]) -> T:
    """Inverse of `to_dict`: rebuilds nested records and tuples from dicts and lists; ignores unknown keys.

    Raises:
        TypeError: a field without a default is missing.
    """
    hints = _hints(typing.cast(Hashable, cls))
    return cls(**{name: _revive(hints[name], value) for name, value in data.items() if name in hints})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _revive(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value)
    origin = typing.get_origin(hint)
    if origin is tuple:
        args = typing.get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_revive(args[0], v) for v in value)
        return tuple(_revive(a, v) for a, v in zip(args, value, strict=True))
    if origin is types.UnionType or value is None:
        return value
    return hint(value)
