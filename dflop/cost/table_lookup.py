"""Which cost table serves a question: one per module, tensor-parallel degree and way of recomputing."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dflop.errors import CostError, did_you_mean
from dflop.records import CostTable

Key = tuple[str, int, bool]


class TableSet:
    """Tables by (module, tp, recompute).

    Args:
        tables: In any order.
        frozen: Modules whose weights are frozen: of two tables at one key they take the frozen one. A module that is
            not among them takes the trained one, as a frozen one does where there is no other: an upper bound.
            None: nothing is known, so the trained one of two, but a frozen one where it is all there is.

    Raises:
        CostError: two tables for one key.
    """

    def __init__(self, tables: Iterable[CostTable], frozen: Collection[str] | None = None) -> None:
        given = list(tables)
        keys = {held: {_key(t) for t in given if t.is_frozen == held} for held in (True, False)}

        def is_chosen(table: CostTable) -> bool:
            if frozen is None:
                return not table.is_frozen or _key(table) not in keys[False]
            return table.is_frozen == (table.module in frozen and _key(table) in keys[True])

        self._tables: dict[Key, CostTable] = {}
        for table in filter(is_chosen, given):
            other = self._tables.setdefault(_key(table), table)
            if other is not table:
                raise CostError(
                    f"two cost tables for module `{table.module}` at tp {table.tp}"
                    + (", recomputing" if table.recompute else ""),
                    where=f"tables {other.table_id} ({_told(other)}) and {table.table_id} ({_told(table)})",
                    hint="select the tables of one profile and one type of hardware",
                )

    @property
    def all(self) -> tuple[CostTable, ...]:
        """Ordered by (module, tp, recompute)."""
        return tuple(self._tables[key] for key in sorted(self._tables))

    def find(self, module: str, tp: int, recompute: bool) -> CostTable | None:
        """The table of that key, if there is one."""
        return self._tables.get((module, tp, recompute))

    def tps(self, module: str) -> tuple[int, ...]:
        """Degrees with a table, ascending.

        Raises:
            CostError: no table for `module`.
        """
        found = tuple(sorted({tp for name, tp, _ in self._tables if name == module}))
        if not found:
            valid = {name for name, _, _ in self._tables}
            raise CostError(f"no cost table for module `{module}`", hint=did_you_mean(module, valid))
        return found

    def missing(self, module: str, tp: int, recompute: bool) -> CostError:
        """Error that says what there is instead."""
        ways = sorted({way for name, _, way in self._tables if name == module})
        if self.tps(module) and recompute not in ways:
            how = "with recomputation" if recompute else "without recomputation"
            return CostError(f"no cost table for module `{module}` {how}", hint=f"profile the module {how}")
        have = ", ".join(str(degree) for degree in self.tps(module))
        return CostError(
            f"no cost table for module `{module}` at tp {tp}; have tp {have}",
            hint="profile the module at that tp, or give CostModel the specs to derive it from tp 1",
        )


def _key(table: CostTable) -> Key:
    return (table.module, table.tp, table.recompute)


def _told(table: CostTable) -> str:
    return f"{table.hardware}{', frozen' if table.is_frozen else ''}"
