"""Tables of encoders whose tower is frozen while their projector trains, made from those of the two known ways.

Layers run as in a frozen encoder: forward alone, nothing kept. All that is outside the layers, the projector with it,
costs what it does in a trained encoder; that is an upper bound, as an embedding of patches has no backward pass here.
Nothing in the table says so but its content: it trains, and its layers have no backward pass (`trains_layers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from dflop.cost import curve
from dflop.cost.curve import edge_part
from dflop.cost.identity import with_table_id
from dflop.models.family import tower_of
from dflop.records import CostTable

DERIVED = "derived"


def tables_for(tables: Iterable[CostTable], frozen: Collection[str]) -> tuple[list[CostTable], tuple[str, ...]]:
    """What a `CostModel` takes where modules and towers are frozen: (tables, frozen modules).

    Args:
        tables: Of one profile, of any ways of running modules. Derived ones are left out, as they may have been derived
            for another set of frozen modules; `CostModel` derives what it needs.
        frozen: Modules whose weights do not train, or `<encoder>.tower` where the projector does.
    """
    given = [table for table in tables if table.source != DERIVED]
    of_tower = {t.module for t in given if tower_of(t.module) in frozen and t.module not in frozen}
    chosen = [table for table in given if table.module not in of_tower]
    held = {(t.module, t.tp): t for t in given if t.is_frozen and not t.recompute}
    for table in given:
        if table.module in of_tower and not table.is_frozen:
            chosen.append(tower_table(table, held.get((table.module, table.tp))))
    return chosen, tuple(name for name in frozen if not name.endswith(tower_of("")))


def tower_table(trained: CostTable, frozen: CostTable | None = None) -> CostTable:
    """Table of an encoder that trains no more than its projector, marked `derived`.

    Args:
        trained: Of the encoder when all of it trains. Layers without a backward pass recompute nothing, so the result
            costs the same with recomputation as without.
        frozen: Of the encoder when nothing trains; None: its layers' forward pass is taken to cost the same.
    """
    layers = (frozen or trained).forward_s
    others = [trained] if frozen is None else [trained, frozen]
    return with_table_id(
        dataclasses.replace(
            trained,
            source=DERIVED,
            forward_s=curve.combine([(1.0, layers), (0.0, trained.forward_s)], [0.0, 1.0]),
            backward_s=edge_part(trained.backward_s),
            activation_bytes=edge_part(trained.activation_bytes),
            num_measurements=min(t.num_measurements for t in others),
            median_error_frac=max(t.median_error_frac for t in others),
            p95_error_frac=max(t.p95_error_frac for t in others),
        )
    )


def trains_layers(table: CostTable) -> bool:
    """Whether weights of the layers train; where they do not, those outside may: only a frozen table's do not."""
    back = table.backward_s
    return not table.is_frozen and bool(
        back.layer_fixed or back.layer_per_token or back.layer_per_sq_token or back.layer_knots
    )
