"""Seconds and bytes of any module on any microbatch, from linear cost tables.

One phase of one module costs `layers * (fixed + per_token * tokens + per_sq_token * sum_sq) + edge terms`: token-wise
matmuls are linear in tokens, attention is linear in the sum of squared sequence lengths, and the fixed terms are the
launch overhead that makes many small microbatches expensive. Linear terms keep packing exact (loads of samples add)
and are good to a few per cent inside the probed range; kernels that step with shape are what `correct/` is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from dflop.errors import CostError, did_you_mean
from dflop.records import CostTable, CostTerms, ModuleLoad, ModulePlan

Floats = npt.NDArray[np.float64]


class CostModel:
    """Cost tables of one model on one kind of hardware, with the corrections learnt so far.

    Args:
        tables: At most one per (module, tp).
        corrections: Factor on a module's seconds; 1.0 where absent. Bytes are never corrected.

    Raises:
        CostError: two tables for the same (module, tp), or a correction of a module without a table.
    """

    def __init__(self, tables: Iterable[CostTable], corrections: Mapping[str, float] | None = None) -> None:
        self._tables: dict[tuple[str, int], CostTable] = {}
        for table in tables:
            other = self._tables.setdefault((table.module, table.tp), table)
            if other is not table:
                raise CostError(
                    f"two cost tables for module `{table.module}` at tp {table.tp}",
                    where=f"tables {other.table_id} ({other.hardware}) and {table.table_id} ({table.hardware})",
                    hint="select the tables of one profile and one kind of hardware",
                )
        self.corrections = dict(corrections or {})
        for module in self.corrections:
            self.tps(module)

    @property
    def tables(self) -> tuple[CostTable, ...]:
        """Every table, ordered by (module, tp)."""
        return tuple(self._tables[key] for key in sorted(self._tables))

    def with_corrections(self, corrections: Mapping[str, float]) -> CostModel:
        """The same tables under other corrections (replacing, not multiplying, the present ones)."""
        return CostModel(self.tables, corrections)

    def tps(self, module: str) -> tuple[int, ...]:
        """Tensor-parallel degrees `module` has a table for, ascending.

        Raises:
            CostError: no table for `module`.
        """
        found = tuple(sorted(tp for name, tp in self._tables if name == module))
        if not found:
            raise CostError(
                f"no cost table for module `{module}`", hint=did_you_mean(module, {name for name, _ in self._tables})
            )
        return found

    def table(self, module: str, tp: int = 1) -> CostTable:
        """The table of `module` at `tp`.

        Raises:
            CostError: there is none; the message lists what there is.
        """
        if (module, tp) not in self._tables:
            have = ", ".join(str(t) for t in self.tps(module))
            raise CostError(
                f"no cost table for module `{module}` at tp {tp}; have tp {have}", hint="profile the module at that tp"
            )
        return self._tables[module, tp]

    def module_seconds(
        self,
        module: str,
        num_items: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        sum_sq_tokens: npt.ArrayLike,
        *,
        num_layers: int,
        edge: bool,
        tp: int = 1,
    ) -> tuple[Floats, Floats]:
        """(forward_s, backward_s) of `num_layers` layers, plus the edge if `edge`, on each microbatch.

        The three loads are scalars or arrays that broadcast; zero tokens cost nothing.
        """
        table, factor = self.table(module, tp), self.corrections.get(module, 1.0)
        load = (num_items, num_tokens, sum_sq_tokens)
        return (
            factor * _evaluate(table.forward_s, load, num_layers, edge),
            factor * _evaluate(table.backward_s, load, num_layers, edge),
        )

    def item_seconds(
        self,
        module: str,
        num_items: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        sum_sq_tokens: npt.ArrayLike,
        *,
        num_layers: int,
        edge: bool,
        tp: int = 1,
    ) -> Floats:
        """Forward + backward seconds a load adds to a microbatch that exists anyway: no fixed terms, so loads add."""
        table, factor = self.table(module, tp), self.corrections.get(module, 1.0)
        load = (num_items, num_tokens, sum_sq_tokens)
        forward = _evaluate(table.forward_s, load, num_layers, edge, fixed=False)
        return factor * (forward + _evaluate(table.backward_s, load, num_layers, edge, fixed=False))

    def activation_bytes(
        self,
        module: str,
        num_items: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        sum_sq_tokens: npt.ArrayLike,
        *,
        num_layers: int,
        edge: bool,
        tp: int = 1,
    ) -> Floats:
        """Bytes one microbatch keeps alive between its forward and its backward."""
        load = (num_items, num_tokens, sum_sq_tokens)
        return _evaluate(self.table(module, tp).activation_bytes, load, num_layers, edge)

    def stage_seconds(self, module_plan: ModulePlan, stage: int, load: ModuleLoad) -> tuple[float, float]:
        """(forward_s, backward_s) of one pipeline stage of a planned module on one microbatch."""
        forward, backward = self.module_seconds(
            module_plan.module,
            load.num_items,
            load.num_tokens,
            load.sum_sq_tokens,
            num_layers=module_plan.layers_per_stage[stage],
            edge=has_edge(module_plan.layers_per_stage, stage),
            tp=module_plan.parallel.tp,
        )
        return float(forward), float(backward)

    def param_bytes(self, module: str, num_layers: int, *, edge: bool, tp: int = 1) -> int:
        """Parameter bytes per process of `num_layers` layers, plus the edge if `edge`."""
        table = self.table(module, tp)
        return num_layers * table.layer_param_bytes + edge * table.edge_param_bytes


def has_edge(layers_per_stage: tuple[int, ...], stage: int) -> bool:
    """Whether a stage pays the edge time: the last one does (head and loss dwarf the embedding lookup)."""
    return stage == len(layers_per_stage) - 1


def _evaluate(
    terms: CostTerms,
    load: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    num_layers: int,
    edge: bool,
    *,
    fixed: bool = True,
) -> Floats:
    items, tokens, sum_sq = (np.asarray(part, dtype=np.float64) for part in load)
    layer = fixed * terms.layer_fixed + terms.layer_per_token * tokens + terms.layer_per_sq_token * sum_sq
    total = num_layers * layer
    if edge:
        total = total + fixed * terms.edge_fixed + terms.edge_per_token * tokens + terms.edge_per_item * items
    return np.where(tokens > 0, total, 0.0)
