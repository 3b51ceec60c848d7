"""The columns of every record kind, derived from the dataclasses; the one mapping between records and Arrow tables.

A kind is a record class that has a table: `StepPlan` is kind `step_plan`, its fields are the columns, in order.
Nested records become structs and tuples become lists, so a row holds a whole record and nothing has to be joined to
rebuild it. `sql/migrations` declares the same columns by hand, with comments; a test compares the two. Imports
pyarrow only: compute nodes write the spool without DuckDB.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from dflop import records
from dflop.cost.identity import trains_of

T = TypeVar("T")

Upgrade = Callable[[pa.Table], pa.Table]


def _with(first: Upgrade | None = None, **constants: float | str) -> Upgrade:
    """Adds columns, after another step, that hold the same value in every row, of the type the value has."""

    def step(table: pa.Table) -> pa.Table:
        table = first(table) if first else table
        for name, value in constants.items():
            table = table.append_column(name, pa.repeat(pa.scalar(value), len(table)))
        return table

    return step


def _straight(table: pa.Table) -> pa.Table:
    """Cost terms without knots."""
    for name in ("forward_s", "backward_s", "activation_bytes"):
        terms = [{**row, "layer_knots": [], "layer_bends": []} for row in table.column(name).to_pylist()]
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, pa.array(terms, _arrow_type(records.CostTerms)))
    return table


def _stating_what_trains(table: pa.Table) -> pa.Table:
    """Cost tables from before they stated it."""
    trains = pa.array([trains_of(row) for row in table.to_pylist()], pa.string())
    return table.drop_columns(["is_frozen"]).append_column("trains", trains)


def _with_places(*degrees: str, **constants: object) -> Upgrade:
    """Plans whose modules get further degrees of 1, and fields; what today's modules have and these do not is null."""

    def step(table: pa.Table) -> pa.Table:
        of_1 = dict.fromkeys(degrees, 1)
        modules = [
            [{**place, **constants, "parallel": {**place["parallel"], **of_1}} for place in places]
            for places in table.column("modules").to_pylist()
        ]
        column = pa.array(modules, pa.list_(_arrow_type(records.ModulePlan)))
        return table.set_column(table.schema.get_field_index("modules"), "modules", column)

    return step


UPGRADES: dict[str, tuple[Upgrade, ...]] = {
    "run_record": (_with(owner=""),),
    "sample_shape": (_with(media_level=0, num_cut_tokens=0, weight=1.0), _with(sum_sq_llm_tokens=0),
                     _with(content_hash=0)),
    "measurement": (
        _with(is_frozen=False, recompute=False, peak_bytes=0, optimizer_s=0.0, status="ok"),
        _with(fp8=records.FP8_OFF),
    ),
    "cost_table": (
        _with(_straight, is_frozen=False, recompute=False, min_tokens=0, max_tokens=0, max_mean_length=0.0,
              noise_frac=0.0, optimizer_s_per_param=0.0),
        _with(fitted_at_s=0.0),
        _stating_what_trains,
        _with(fp8=records.FP8_OFF),
    ),
    "link_cost": (_with(fitted_at_s=0.0),),
    "correction": (
        _with(lambda table: table.append_column("level", table.column("factor")),
              min_tokens=0, max_tokens=records.ALL_TOKENS, sd_frac=0.0, is_in_force=True),
    ),
    "plan": (
        _with(_with_places(recompute=False, shard_optimizer=False, max_tokens=0), sync_s=0.0, uniform_step_s=math.nan),
        _with_places(recomputed=[], parameter_shards=1, gather_s=[], scatter_s=[]),
        _with_places(offloaded=[]),
        _with_places("cp", cost_growth=0.0),
        _with_places(recompute_tokens=[]),
        lambda table: table.drop_columns(["layout"]),
        _with_places("ep"),
        _with_places(merge_tokens=0),
    ),
}  # fmt: skip
"""Per kind, the steps from schema version 1 to 2, 2 to 3, ...: each takes rows of one version to the next.

Spool files are never rewritten, so a kind whose columns change gets a step here (fill the new column, drop the old)
next to its migration; its version is one more than its steps. Old files then ingest and rebuild for ever.
"""

VERSION_KEY = b"dflop.schema_version"


def kind_of(cls: type[Any]) -> str:
    """Kind, and table name, of a record class: `StepPlan -> 'step_plan'`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


_WITH_TABLE: tuple[type[Any], ...] = (
    records.RunRecord, records.JobRecord, records.RunInput, records.RunEvent, records.ProfileRecord,
    records.SampleShape, records.QuarantinedSample, records.Measurement, records.CostTable, records.LinkMeasurement,
    records.LinkCost, records.Plan, records.PlanProgram, records.StepPlan, records.StepObservation, records.StepFlops,
    records.RankSpan, records.RankMemory, records.ExpertLoad, records.SourceLoss, records.GradNorm, records.Correction,
    records.RankFactor, records.Decision,
)  # fmt: skip
KINDS = {kind_of(cls): cls for cls in _WITH_TABLE}
"""Record class of every kind."""
RETIRED = frozenset({"gate_reading"})
"""Kinds that earlier versions wrote and that have no table any more: their files stay, and are files of no rows."""


def version_of(kind: str) -> int:
    """Schema version that is written today; 1 for a kind that never changed."""
    return 1 + len(UPGRADES.get(kind, ()))


def file_version(metadata: Mapping[bytes, bytes]) -> int:
    """Schema version in the key-value metadata of a spool file.

    Raises:
        ValueError: There is none, or it is no positive number.
    """
    text = metadata.get(VERSION_KEY, b"").decode(errors="replace")
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ValueError(f"schema version in the file is {text!r}, expected a positive number")
    return int(text)


def upgrade(kind: str, version: int, table: pa.Table) -> pa.Table:
    """Rows of an older schema version in the columns of today's.

    Raises:
        ValueError, pyarrow.ArrowException: They are not rows of that version.
    """
    if kind in RETIRED:
        return pa.table({})
    for step in UPGRADES.get(kind, ())[version - 1 :]:
        try:
            table = step(table)
        except (KeyError, TypeError) as error:  # a column is missing, or null
            raise ValueError(f"no rows of schema version {version} of `{kind}`: {error}") from None
    today = arrow_schema(kind).names
    if sorted(today) == sorted(table.schema.names):  # steps append; a file with other columns is refused by its reader
        table = table.select(today)
    return table.replace_schema_metadata()


@functools.cache
def arrow_schema(kind: str) -> pa.Schema:
    """Arrow schema of a kind: int64, float64, string and bool, structs and lists of these."""
    return pa.schema(_fields(KINDS[kind]))


def to_table(cls: type[Any], rows: Sequence[Any]) -> pa.Table:
    """Arrow table of records of one class; one row each, in order."""
    wanted = arrow_schema(kind_of(cls))
    try:
        columns = [_column([getattr(row, field.name) for row in rows], field.type) for field in wanted]
    except pa.ArrowException:
        raise
    except (AttributeError, TypeError) as error:
        raise pa.ArrowTypeError(f"expected a record: {error}") from None
    return pa.Table.from_arrays(columns, schema=wanted)


def from_table(cls: type[T], table: pa.Table) -> list[T]:
    """Inverse of `to_table`; columns that are no field of `cls` (provenance) are ignored."""
    return [records.from_dict(cls, row) for row in table.to_pylist()]


def _column(values: Sequence[Any], wanted: pa.DataType) -> pa.Array:
    """Values of one column: records field by field, tuples end to end, so that there is no dict for any of them."""
    if pa.types.is_struct(wanted):
        fields = [wanted.field(i) for i in range(wanted.num_fields)]
        columns = [_column([getattr(v, f.name) for v in values], f.type) for f in fields]
        return pa.StructArray.from_arrays(columns, fields=fields)
    if pa.types.is_list(wanted):
        ends = list(itertools.accumulate((len(v) for v in values), initial=0))
        flat = _column([element for v in values for element in v], wanted.value_type)
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, type=wanted)
    return pa.array(values, wanted)


def _fields(cls: type[Any]) -> list[pa.Field]:
    hints = typing.get_type_hints(cls)
    return [pa.field(f.name, _arrow_type(hints[f.name])) for f in dataclasses.fields(cls)]


def _arrow_type(hint: Any) -> pa.DataType:
    if scalar := {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}.get(hint):
        return scalar
    if dataclasses.is_dataclass(hint):
        return pa.struct(_fields(typing.cast("type[Any]", hint)))
    if typing.get_origin(hint) is tuple:
        elements = {arg for arg in typing.get_args(hint) if arg is not Ellipsis}
        if len(elements) == 1:
            return pa.list_(_arrow_type(elements.pop()))
    raise TypeError(f"records may hold int, float, str, bool, records and tuples of one of these; not {hint}")
