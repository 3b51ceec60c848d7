"""What a data sheet and a machine say of each term of a plan's costs, and which of the two the plan is made from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dflop.cost.analytic import SOFTWARE, analytic_cost_tables, analytic_link_costs
from dflop.cost.curve import Load, evaluate
from dflop.cost.devices import Device, sheet_of
from dflop.cost.link_costs import P2P, LinkModel
from dflop.cost.model import CostModel
from dflop.models.family import tower_of
from dflop.records import (
    FP8_OFF,
    TRAINS_ADAPTERS,
    TRAINS_NONE,
    TRAINS_PROJECTOR,
    ClusterSpec,
    CostTable,
    LinkCost,
    ModuleSpec,
    RunMode,
)

LENGTH, NUM_SEQUENCES = 1024, 8
LOAD: Load = NUM_SEQUENCES, NUM_SEQUENCES * LENGTH, NUM_SEQUENCES * LENGTH**2
"""A microbatch as in `dflop cost drift`."""
MESSAGE_BYTES = 64 << 20
SECONDS, BYTES = "s", "bytes"
OF_MODULE: Mapping[str, tuple[Callable[[CostTable], float], str]] = {
    "forward of a layer": (lambda table: float(evaluate(table.forward_s, LOAD, 1, False)), SECONDS),
    "backward of a layer": (lambda table: float(evaluate(table.backward_s, LOAD, 1, False)), SECONDS),
    "launches of a layer": (lambda table: float(evaluate(table.forward_s, (1, 1, 1), 1, False)), SECONDS),
    "outside the layers": (
        lambda table: sum(float(evaluate(of, LOAD, 0, True)) for of in (table.forward_s, table.backward_s)),
        SECONDS,
    ),
    "kept by a layer": (lambda table: float(evaluate(table.activation_bytes, LOAD, 1, False)), BYTES),
    "optimizer, 1e9 parameters": (lambda table: 1e9 * table.optimizer_s_per_param, SECONDS),
}
"""Terms of a table and their units; launches are the forward pass of one token."""


@dataclass(frozen=True, slots=True)
class Term:
    """Seconds or bytes of one term; NaN where nothing is known."""

    name: str
    sheet: float
    measured: float
    used: str
    """`data sheet`, `measured` or `derived`, of what was measured."""
    unit: str
    """`s` or `bytes`."""


def cost_terms(
    cost: CostModel, modes: Collection[tuple[ModuleSpec, RunMode]], cluster: ClusterSpec
) -> tuple[Term, ...]:
    """The terms of modules and links.

    Args:
        cost: What plans are made from.
        modes: Modules, at least one, and how each runs.
        cluster: Whose links are listed.
    """
    tables = [(spec, cost.table(spec.module, replace(mode, recompute=False))) for spec, mode in modes]
    sheet = sheet_of(tables[0][1].hardware)
    of_modules = (term for spec, table in tables for term in _module_terms(spec, table, sheet))
    return *of_modules, *_link_terms(cost.links, cluster, sheet)


def _module_terms(spec: ModuleSpec, used: CostTable, sheet: Device | None) -> Iterator[Term]:
    own = None if sheet is None else _sheet_table(spec, used, sheet)
    for name, (value, unit) in OF_MODULE.items():
        of_sheet = math.nan if own is None else value(own)
        yield _term(f"{spec.module} tp{used.tp}: {name}", of_sheet, used, value(used), unit)


def _sheet_table(spec: ModuleSpec, used: CostTable, sheet: Device) -> CostTable:
    """At the same degree, with as much that trains, in FP8 where that is used and there."""
    module, price = spec.module, partial(
        analytic_cost_tables, [replace(spec, tp_choices=(used.tp,))], sheet, profile_key="", recompute=[False],
        fp8=used.fp8 if sheet.fp8_ratio else FP8_OFF,
    )  # fmt: skip
    held = {TRAINS_NONE: [module], TRAINS_PROJECTOR: [tower_of(module)]}.get(used.trains, [])
    adapted = [module] if used.trains == TRAINS_ADAPTERS else []
    tables = [*price(), *price(frozen=[module])]
    return CostModel(tables, frozen=held, adapted=adapted, specs=[spec]).table(module, RunMode(used.tp))


def _link_terms(links: Sequence[LinkCost], cluster: ClusterSpec, sheet: Device | None) -> Iterator[Term]:
    """Terms of each operation's largest group, in a node and between nodes."""
    known = LinkModel(
        () if sheet is None else analytic_link_costs(
            sheet, num_nodes=cluster.num_nodes, num_processes_per_node=cluster.num_processes_per_node, profile_key=""
        )
    )  # fmt: skip
    used = LinkModel(links)
    wide = sorted(links, key=lambda link: (link.op != P2P, link.op, link.num_nodes > 1, link.num_ranks))
    for (op, is_wide), group in itertools.groupby(wide, key=lambda link: (link.op, link.num_nodes > 1)):
        link = list(group)[-1]
        if is_wide and cluster.num_nodes == 1:
            continue
        asked = op, MESSAGE_BYTES, link.num_ranks, link.num_nodes
        where = f"over {link.num_nodes} nodes" if is_wide else "in a node"
        name = f"{op.replace('_', '-')}, 64 MiB, {link.num_ranks} ranks {where}"
        yield _term(name, known.seconds(*asked) or math.nan, link, used.seconds(*asked), SECONDS)


def _term(name: str, sheet: float, of: CostTable | LinkCost, used: float, unit: str) -> Term:
    if of.software == SOFTWARE:
        return Term(name, used, math.nan, "data sheet", unit)
    return Term(name, sheet, used, of.source, unit)
