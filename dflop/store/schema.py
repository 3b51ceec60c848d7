"""The columns of every record kind, derived from the dataclasses; the one mapping between records and Arrow tables.

A kind is a record class that has a table: `StepPlan` is kind `step_plan`, its fields are the columns, in order.
Nested records become structs and tuples become lists, so a row holds a whole record and nothing has to be joined to
rebuild it. `sql/migrations` declares the same columns by hand, with comments; a test compares the two. Imports
pyarrow only: compute nodes write the spool without DuckDB.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import pyarrow as pa

from dflop import records

T = TypeVar("T")

SCHEMA_VERSION = 1
"""Written into every spool file; raised when a kind's columns change."""

CLASSES: tuple[type[Any], ...] = (
    records.RunRecord,
    records.JobRecord,
    records.ProfileRecord,
    records.SampleShape,
    records.QuarantinedSample,
    records.Measurement,
    records.CostTable,
    records.Plan,
    records.StepPlan,
    records.StepObservation,
    records.Correction,
)


def kind_of(cls: type[Any]) -> str:
    """Kind, and table name, of a record class: `StepPlan -> 'step_plan'`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


KINDS: dict[str, type[Any]] = {kind_of(cls): cls for cls in CLASSES}
"""Record class of every kind."""


@functools.cache
def arrow_schema(kind: str) -> pa.Schema:
    """Arrow schema of a kind: int64, float64, string and bool, structs and lists of these."""
    return pa.schema(_fields(KINDS[kind]))


def to_table(cls: type[Any], rows: Sequence[Any]) -> pa.Table:
    """Arrow table of records of one class; one row each, in order.

    Raises:
        pyarrow.ArrowException: A value does not fit its column (a string where a number belongs).
    """
    return pa.Table.from_pylist([records.to_dict(row) for row in rows], schema=arrow_schema(kind_of(cls)))


def from_table(cls: type[T], table: pa.Table) -> list[T]:
    """Inverse of `to_table`; columns that are no field of `cls` (provenance) are ignored."""
    return [records.from_dict(cls, row) for row in table.to_pylist()]


def _fields(cls: type[Any]) -> list[pa.Field]:
    hints = typing.get_type_hints(cls)
    return [pa.field(f.name, _arrow_type(hints[f.name])) for f in dataclasses.fields(cls)]


def _arrow_type(hint: Any) -> pa.DataType:
    scalars = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
    if hint in scalars:
        return scalars[hint]
    if dataclasses.is_dataclass(hint):
        return pa.struct(_fields(typing.cast("type[Any]", hint)))
    if typing.get_origin(hint) is tuple:
        elements = {arg for arg in typing.get_args(hint) if arg is not Ellipsis}
        if len(elements) == 1:
            return pa.list_(_arrow_type(elements.pop()))
    raise TypeError(f"records may hold int, float, str, bool, records and tuples of one of these; not {hint}")
