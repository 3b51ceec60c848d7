"""Terms of costs: what the sheet and the machine say of the same thing, and which of them counts."""

import dataclasses
import math

import pytest

from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs, with_sheet_links
from dflop.cost.devices import H100, sheet_of
from dflop.cost.link_costs import ALL_GATHER, ALL_REDUCE, HOST_COPY, P2P
from dflop.cost.model import CostModel
from dflop.cost.terms import OF_MODULE, cost_terms
from dflop.records import LLM, RunMode
from tests.builders import make_cluster, make_link, make_specs

CLUSTER = dataclasses.replace(make_cluster(8), num_nodes=2)
SPECS = make_specs("vision")
MODES = [(spec, RunMode()) for spec in SPECS]


def terms_of(*, slower: float = 1.0, links=(), **how):
    """Costs that a machine called as the sheet's took `slower` times as long for."""
    tables = analytic_cost_tables(SPECS, H100, profile_key="", **how)
    if slower != 1.0:
        tables = [
            dataclasses.replace(
                t, source="measured", software="torch", hardware="cuda: NVIDIA H100 80GB HBM3",
                optimizer_s_per_param=slower * t.optimizer_s_per_param,
            )
            for t in tables
        ]  # fmt: skip
    trains = {"frozen": how.get("frozen", ()), "specs": SPECS}
    return {t.name: t for t in cost_terms(CostModel(tables, links=links, **trains), MODES, CLUSTER)}


def test_by_a_data_sheet_every_term_is_the_sheets():
    links = analytic_link_costs(H100, num_nodes=2, num_processes_per_node=8, profile_key="")
    found = terms_of(links=links)
    assert {t.used for t in found.values()} == {"data sheet"}
    assert all(math.isnan(t.measured) and t.sheet > 0 for t in found.values())
    assert len(found) == 2 * len(OF_MODULE) + 7, "three operations in a node and between nodes, copies to the host"


@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision.tower",)])
def test_what_was_measured_stands_next_to_what_the_sheet_says_of_the_same(frozen):
    found = terms_of(slower=1.25, frozen=frozen)
    of_projector = {"derived"} if frozen == ("vision.tower",) else {"measured"}
    assert {t.used for name, t in found.items() if name.startswith("vision")} == of_projector
    assert {t.used for name, t in found.items() if name.startswith(LLM)} == {"measured"}
    off = {name: t.measured / t.sheet for name, t in found.items() if t.sheet > 0}
    assert off == pytest.approx({name: 1.25 if "optimizer" in name else 1.0 for name in off})
    assert f"{LLM} tp1: optimizer, 1e9 parameters" in off


def test_messages_that_were_not_profiled_are_the_sheets():
    measured = [make_link(op, 8, 1, 1e-5, 1e11) for op in (P2P, ALL_REDUCE, ALL_GATHER, HOST_COPY)]
    links = with_sheet_links(measured, sheet_of("cuda: NVIDIA H100 80GB HBM3"), num_nodes=2, num_processes_per_node=8)
    assert links[:4] == measured
    assert {(link.num_nodes, link.source) for link in links[4:]} == {(2, "analytic")}
    found = {name: t for name, t in terms_of(slower=1.25, links=links).items() if "MiB" in name}
    assert {(("a node" in name), t.used) for name, t in found.items()} == {(True, "measured"), (False, "data sheet")}
    # Without a data sheet nothing is guessed, nor where everything was measured.
    for hardware in ("cpu: AMD EPYC 9R14", "NVIDIA H100 PCIe"):
        assert with_sheet_links(measured, sheet_of(hardware), num_nodes=2, num_processes_per_node=8) == measured
    assert with_sheet_links(links, H100, num_nodes=4, num_processes_per_node=8) == links
