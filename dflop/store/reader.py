"""Typed reads for programs: records out of one snapshot, whose number says exactly what a plan or a run has read.

A reader never waits for the ingester and never sees it work: it opens the snapshot that CURRENT names (about 15 ms)
and stays on it. What "latest" means is defined once, in `sql/views`; this file only picks rows and rebuilds records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa

from dflop.errors import StoreError, did_you_mean
from dflop.records import Correction, CostTable, Decision, LinkCost, ProfileRecord, SampleShape
from dflop.records.speedup import NOT_COMPARED, Speedup
from dflop.store import schema, snapshot
from dflop.store.console import named_query

T = TypeVar("T")
Value = int | float | str | bool
Where = Mapping[str, Value | Iterable[Value]]
"""Column to value, or to several values of which one must match."""

_FILE_ORDER = "_run_id, _producer, _seq, rowid"
_FITTED = {"fitted_at_s": "coalesce(epoch(fitted_at), 0)"}


class Reader:
    """Read-only view of the newest snapshot at the time of opening; use it as a context manager.

    Raises:
        StoreError: Nothing was published yet, or the snapshot cannot be opened.
    """

    def __init__(self, store_root: Path | str) -> None:
        self._con, self.snapshot = snapshot.open_current(store_root)
        """`snapshot`: which one; record its `seq` and `revision` with whatever is computed from what was read."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._con.close()

    @property
    def seq(self) -> int:
        return self.snapshot.seq

    def records(self, cls: type[T], *, where: Where = MappingProxyType({})) -> list[T]:
        """Every row of a kind, in spool order, whose columns equal the given values.

        Raises:
            StoreError: `cls` has no such column.
        """
        kind = schema.kind_of(cls)
        columns = schema.arrow_schema(kind).names
        for name in set(where) - set(columns):
            raise StoreError(f"{kind} has no column `{name}`", hint=did_you_mean(name, columns))
        return self._read(cls, kind, where, order=_FILE_ORDER)

    def arrays(
        self, relation: str, columns: Sequence[str], *, where: Where = MappingProxyType({})
    ) -> dict[str, np.ndarray]:
        """Columns of a table or view as numpy arrays of equal length; no Python object per row is made for numbers.

        They hold numbers or text, and may be fields of structs: `forward_s.layer_fixed`.

        Raises:
            StoreError: There is no such relation or column, or a value is null.
        """
        clauses, params = _conditions(where)
        listed = ", ".join(f"{_quoted(name)} as c{i}" for i, name in enumerate(columns))
        rows = self._fetch(f"select {listed} from {_quoted(relation)} where {clauses}", params, relation)
        found = dict(zip(columns, rows.columns, strict=True))
        for name in (name for name, column in found.items() if column.null_count):
            raise StoreError(f"{relation}.{name} holds nulls", where=f"snapshot {self.seq}")
        return {name: column.to_numpy() for name, column in found.items()}

    def latest_cost_tables(self, profile_key: str) -> list[CostTable]:
        """Cost tables of a model profile, one per (module, tp, trains, recompute), measured before analytic; sorted."""
        order = "module, tp, trains, recompute, table_id"
        return self._read(CostTable, "v_cost_table_latest", {"profile_key": profile_key}, order=order, computed=_FITTED)

    def latest_link_costs(self, profile_key: str) -> list[LinkCost]:
        """Link costs of a model profile, one per (op, ranks, nodes), measured before analytic; sorted."""
        order = "op, num_ranks, num_nodes, hardware, software"
        return self._read(LinkCost, "v_link_cost_latest", {"profile_key": profile_key}, order=order, computed=_FITTED)

    def corrections_in_force(self, profile_key: str, *, is_frozen: bool | None = None) -> list[Correction]:
        """The newest set of corrections of every module of a model profile, learnt with any tp and recompute.

        As they were learnt: letting what is old count for less is the caller's business. A row per bucket of sizes,
        sorted by module, trained before frozen, and tokens; only one of these two states where it is given.
        """
        where: Where = {"profile_key": profile_key, "is_frozen": [False, True] if is_frozen is None else [is_frozen]}
        at_s = "coalesce(epoch(observed_at), 0)"  # a time that is none counts as long ago
        order = "module, is_frozen, min_tokens"
        return self._read(Correction, "v_correction_in_force", where, order=order, computed={"observed_at_s": at_s})

    def speedups(self, run_id: str) -> dict[str, tuple[Speedup, Speedup]]:
        """Measured and simulated speed-up of a run's compared batches over each baseline, as `v_speedup` has them."""
        found = self._fetch("from v_speedup where run_id = ?", [run_id], "v_speedup").to_pylist()
        return {row["baseline"]: (_speedup(row, "measured"), _speedup(row, "predicted")) for row in found}

    def decisions(self, run_id: str) -> list[Decision]:
        """What a run noticed about its own speed and what was done about it, in order."""
        return self._read(Decision, "decision", {"run_id": run_id}, order=f"observed_at_s, {_FILE_ORDER}")

    def profile(self, profile_key: str) -> ProfileRecord | None:
        """The finished profile of this key; None when it has yet to be computed (or was not completed)."""
        found = self._read(ProfileRecord, "profile_record", {"profile_key": profile_key}, order="created_at_s")
        return found[-1] if found else None

    def shapes(self, profile_key: str, *, max_samples: int | None = None) -> list[SampleShape]:
        """Samples of a data profile, each once, sorted by `sample_index`.

        Of more than `max_samples` only so many, spread over the dataset, the same ones every time.
        """
        # Knuth's multiplicative hash: DuckDB's own may change from version to version.
        mixed = f"(sample_index * 2654435761) % 4294967296, sample_index limit {max_samples or 0:d}"
        order = "sample_index" if max_samples is None else mixed
        found = self._read(SampleShape, "v_sample_shape", {"profile_key": profile_key}, order=order)
        return sorted(found, key=lambda s: s.sample_index)

    def largest_samples(self, profile_key: str) -> list[SampleShape]:
        """Samples of a data profile that are the largest in something, as `sql/queries/largest_samples.sql` has it."""
        found = self._fetch(named_query("largest_samples").sql, {"profile_key": profile_key}, "the largest samples")
        where = {"profile_key": [profile_key], "sample_index": sorted(set(found["sample_index"].to_pylist()))}
        return self._read(SampleShape, "v_sample_shape", where, order="sample_index")

    def _read(
        self,
        cls: type[T],
        relation: str,
        where: Where,
        *,
        order: str,
        computed: Mapping[str, str] = MappingProxyType({}),
    ) -> list[T]:
        """Records out of a relation that has their columns, or for which there is SQL."""
        return schema.from_table(cls, self.table(cls, relation, where, order=order, computed=computed))

    def table(
        self, cls: type[Any], relation: str, where: Where, *, order: str,
        computed: Mapping[str, str] = MappingProxyType({}),
    ) -> pa.Table:  # fmt: skip
        """The columns of a record class in a table or view, as it is; `order` is SQL."""
        columns = schema.arrow_schema(schema.kind_of(cls)).names
        clauses, params = _conditions(where)
        listed = ", ".join(f"{computed.get(name, _quoted(name))} as {_quoted(name)}" for name in columns)
        return self._fetch(f"select {listed} from {relation} where {clauses} order by {order}", params, relation)

    def _fetch(self, sql: str, params: list[Value] | dict[str, Value], relation: str) -> pa.Table:
        try:
            return snapshot.run(self._con, sql, params).to_arrow_table()
        except duckdb.Error as error:
            problem, hint = f"cannot read {relation}: {str(error).splitlines()[0]}", snapshot.lag(self._con)
            raise StoreError(problem, where=f"snapshot {self.seq}", hint=hint) from error


def _conditions(where: Where) -> tuple[str, list[Value]]:
    clauses, params = [], []
    for name, value in where.items():
        values = [value] if isinstance(value, int | float | str) else list(value)
        clauses.append(f"{_quoted(name)} in ({', '.join('?' * len(values))})" if values else "false")
        params += values
    return " and ".join(clauses) or "true", params


def _speedup(row: Mapping[str, Any], what: str) -> Speedup:
    values = (row[f"{what}_speedup{end}"] for end in ("", "_low", "_high"))
    mean, low, high = (math.nan if value is None else value for value in values)
    return NOT_COMPARED if math.isnan(mean) else Speedup(mean, low, high, row["num_batches"])


def _quoted(name: str) -> str:
    """A column, or a path into a struct, as SQL that can be nothing else."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in name.split("."))
