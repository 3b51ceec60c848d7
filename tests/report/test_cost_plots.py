import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflop.records import CostTable, Measurement
from dflop.report import cost_plots
from dflop.report.cost_plots import COLUMNS, RESIDUAL_COLUMNS, Fitted, fitted, residual_rows, save_cost_plots
from tests.builders import make_probe, make_table


def probes(table: CostTable, num: int = 24, off: float = 1.0) -> list[Measurement]:
    """What `table` would measure, times `off`."""
    rng, found = np.random.default_rng(0), []
    for i in range(num):
        items, length = int(rng.integers(1, 9)), int(rng.integers(20, 400))
        probe = make_probe(table, 1 + i % 2, items, items * length, items * length**2, noise=off)
        found.append(replace(probe, group=("random", "single", "adaptive")[i % 3], software=table.software))
    return found


def test_tables_meet_the_probes_that_ran_the_same_way() -> None:
    plain = replace(make_table("llm"), max_tokens=3200, min_tokens=20, max_mean_length=400.0)
    again, frozen = replace(plain, recompute=True), replace(plain, trains="none")
    lost = replace(probes(plain)[0], status="oom")
    pairs = fitted([plain, again, frozen], [*probes(plain), *probes(again, 10), lost])
    assert [len(p.probes) for p in pairs] == [24, 10, 0]
    assert [p.title for p in pairs] == [f"llm, tp 1, {way}, analytic" for way in ("train", "recompute", "frozen")]
    rows = cost_plots.table_rows(pairs)
    assert [row[2] for row in rows] == ["train", "recompute", "frozen"]
    assert all(len(row) == len(COLUMNS) for row in rows)
    # 1000 tokens of half the longest mean length, forward and backward: 3 * (1 ms + 10 ms + 0.2 ms).
    assert rows[0][COLUMNS.index("per_layer_1k_tokens")] == "33.6 ms"
    assert rows[0][COLUMNS.index("fixed_per_layer")] == "3.0 ms"


def test_residuals_are_those_of_the_probes() -> None:
    table = make_table("llm")
    exact = residual_rows(Fitted(table, tuple(probes(table))))
    slow = residual_rows(Fitted(table, tuple(probes(table, off=1.25))))
    column = RESIDUAL_COLUMNS.index("residual")
    assert {row[column] for row in exact} == {"+0.0 %"}
    assert {row[column] for row in slow} == {"-20.0 %"}
    assert sum(row[RESIDUAL_COLUMNS.index("probes")] for row in exact) == 24
    assert [row[1] for row in exact] == [1] * 6 + [2] * 6


def test_curves_and_residuals_are_drawn(tmp_path: Path) -> None:
    table = make_table("llm")
    for name, measured in (("probed", tuple(probes(table))), ("analytic", ())):
        path = tmp_path / f"{name}.svg"
        save_cost_plots([Fitted(table, measured)], path, "a model on a machine")
        assert ET.parse(path).getroot().tag.endswith("svg")
