"""Which cost table serves a question: one per module, tensor-parallel degree and recomputation, of what trains.

Those that were not measured are derived: of a degree by `tensor_parallel.py`; of an encoder whose tower is frozen while
its projector trains from those of the two known states; of adapters likewise (`adapters.py`); of layers of which a
share recomputes as their mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from dflop.cost import curve
from dflop.cost.adapters import adapter_table
from dflop.cost.curve import edge_part
from dflop.cost.identity import with_table_id
from dflop.cost.link_costs import LinkModel
from dflop.cost.tensor_parallel import DERIVED, derive_table
from dflop.errors import CostError, did_you_mean
from dflop.models.family import tower_of
from dflop.records import TRAINS_ADAPTERS, TRAINS_ALL, TRAINS_NONE, TRAINS_PROJECTOR, CostTable, ModuleSpec

Key = tuple[str, int, float]
"""(module, tp, share of the layers that recompute)."""


class TableSet:
    """The tables of one training.

    Args:
        tables: In any order.
        frozen: Modules whose weights do not train, or `<encoder>.tower` where the projector does. Frozen modules take
            the table of a trained one where there is no other: an upper bound. None: nothing is known, so of several
            tables the one of which most trains.
        adapted: Modules of which adapters train, unless they are frozen; their specs say how large these are.
        specs: With the spec of a module, a degree without a table is derived from tp 1.
        links: All-reduces of tensor-parallel ranks.

    Raises:
        CostError: two tables for one key and the same state of training.
    """

    def __init__(
        self, tables: Iterable[CostTable], frozen: Collection[str] | None, specs: Mapping[str, ModuleSpec],
        links: LinkModel, adapted: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._specs, self._links = specs, links
        self._derived: dict[Key, CostTable] = {}
        given: dict[Key, dict[str, CostTable]] = {}
        for table in tables:
            key = (table.module, table.tp, table.recompute)
            other = given.setdefault(key, {}).setdefault(table.trains, table)
            if other is not table:
                raise CostError(
                    f"two cost tables for module `{table.module}` at tp {table.tp}"
                    + (", recomputing" if table.recompute else ""),
                    where=f"tables {other.table_id} ({_told(other)}) and {table.table_id} ({_told(table)})",
                    hint="select the tables of one profile and one type of hardware",
                )
        for (module, tp, _), states in given.items():
            if tower_of(module) in (frozen or ()) and TRAINS_ALL in states and TRAINS_PROJECTOR not in states:
                plain = given.get((module, tp, False), {})
                states[TRAINS_PROJECTOR] = tower_table(states[TRAINS_ALL], plain.get(TRAINS_NONE))
            if module in adapted and TRAINS_ALL in states and TRAINS_ADAPTERS not in states:
                plain = given.get((module, tp, False), {})
                states[TRAINS_ADAPTERS] = adapter_table(states[TRAINS_ALL], plain, specs[module])
        chosen = {key: _first(states, _preferred(key[0], frozen, adapted)) for key, states in given.items()}
        self._tables = {key: table for key, table in chosen.items() if table is not None}

    @property
    def all(self) -> tuple[CostTable, ...]:
        """Tables given and chosen, ordered by (module, tp, recompute)."""
        return tuple(self._tables[key] for key in sorted(self._tables))

    def table(self, module: str, tp: int, recompute: float) -> CostTable:
        """The table of that key, measured, analytic or derived.

        Raises:
            CostError: there is none; the message lists what there is.
        """
        key = (module, tp, recompute)
        found = self._tables.get(key) or self._derived.get(key)
        if found is None:
            base = self._tables.get((module, 1, recompute))
            if 0 < recompute < 1:
                found = mean_table(self.table(module, tp, False), self.table(module, tp, True), recompute)
            elif base is None or module not in self._specs:
                raise self._missing(*key)
            else:
                found = derive_table(base, tp, self._specs[module], self._links)
            self._derived[key] = found
        return found

    def tps(self, module: str) -> tuple[int, ...]:
        """Degrees with a table or for which one can be derived, ascending.

        Raises:
            CostError: no table for `module`.
        """
        measured = self._measured_tps(module)
        derived = self._specs[module].tp_choices if module in self._specs and 1 in measured else ()
        return tuple(sorted({*measured, *derived}))

    def _measured_tps(self, module: str) -> set[int]:
        found = {tp for name, tp, _ in self._tables if name == module}
        if not found:
            valid = {name for name, _, _ in self._tables}
            raise CostError(f"no cost table for module `{module}`", hint=did_you_mean(module, valid))
        return found

    def _missing(self, module: str, tp: int, recompute: float) -> CostError:
        have = sorted(self._measured_tps(module))
        if recompute not in {share for name, _, share in self._tables if name == module}:
            how = "with recomputation" if recompute else "without recomputation"
            return CostError(f"no cost table for module `{module}` {how}", hint=f"profile the module {how}")
        return CostError(
            f"no cost table for module `{module}` at tp {tp}; have tp {', '.join(map(str, have))}",
            hint="profile the module at that tp, or give CostModel the specs to derive it from tp 1",
        )


def _preferred(module: str, frozen: Collection[str] | None, adapted: Collection[str]) -> tuple[str, ...]:
    if frozen is None:
        return TRAINS_ALL, TRAINS_PROJECTOR, TRAINS_ADAPTERS, TRAINS_NONE
    if module in frozen:
        return TRAINS_NONE, TRAINS_ALL
    if module in adapted:
        return (TRAINS_ADAPTERS,)
    return (TRAINS_PROJECTOR,) if tower_of(module) in frozen else (TRAINS_ALL,)


def _first(states: Mapping[str, CostTable], among: Iterable[str]) -> CostTable | None:
    return next((states[trains] for trains in among if trains in states), None)


def _told(table: CostTable) -> str:
    return f"{table.hardware}{', frozen' if table.is_frozen else ''}"


def tower_table(trained: CostTable, frozen: CostTable | None = None) -> CostTable:
    """Table of an encoder that trains no more than its projector, marked `derived`.

    Layers run as in a frozen encoder: forward alone, nothing kept, nothing to recompute. All that is outside the layers
    costs what it does in a trained encoder; that is an upper bound, as an embedding of patches has no backward pass.

    Args:
        trained: Of the encoder when all of it trains.
        frozen: Of the encoder when nothing trains; None: its layers' forward pass is taken to cost the same.
    """
    layers = (frozen or trained).forward_s
    others = [trained] if frozen is None else [trained, frozen]
    return with_table_id(
        dataclasses.replace(
            trained,
            source=DERIVED,
            trains=TRAINS_PROJECTOR,
            forward_s=curve.combine([(1.0, layers), (0.0, trained.forward_s)], [0.0, 1.0]),
            backward_s=edge_part(trained.backward_s),
            activation_bytes=edge_part(trained.activation_bytes),
            num_measurements=min(t.num_measurements for t in others),
            median_error_frac=max(t.median_error_frac for t in others),
            p95_error_frac=max(t.p95_error_frac for t in others),
        )
    )


def mean_table(plain: CostTable, again: CostTable, frac: float) -> CostTable:
    """The table of a module of which a share of layers recomputes: edges of `plain`, layers between the two."""
    forward, backward, kept = (
        curve.combine([(1 - frac, a), (frac, b)], [1.0, 0.0])
        for a, b in (
            (plain.forward_s, again.forward_s),
            (plain.backward_s, again.backward_s),
            (plain.activation_bytes, again.activation_bytes),
        )
    )
    return with_table_id(dataclasses.replace(again, forward_s=forward, backward_s=backward, activation_bytes=kept))
