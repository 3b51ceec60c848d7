"""What predicting and fitting costs take, on this machine: `python -m tests.bench.cost [--json FILE]`.

One process on one core. Predictions are compared with the loop that evaluates the formula load by load, which the tests
hold them equal to; a fit has no other way to compare with.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np

from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel
from dflop.records import CostTable, CostTerms
from tests.bench.command import keep_to, options
from tests.bench.figures import Figure, finish, line
from tests.builders import make_probe, make_specs, make_table, random_loads
from tests.cost.reference import cost_of_one_load

NUM_LOADS, NUM_PROBES, NUM_LAYERS = 100_000, 500, 28
CURVE = CostTerms(3e-5, 1e-8, 1e-12, 5e-5, 2e-8, 1e-6, (300.0, 1000.0, 3000.0, 8000.0), (2e-8, 1e-8, 5e-9, -4e-9))


def main() -> None:
    args = options(__doc__).parse_args()
    keep_to(1)
    table = make_table("llm", forward_s=CURVE, backward_s=CURVE)
    figures = []
    for step in (predict_figure, fit_figure):
        figures.append(step(table))
        print(line(figures[-1]), flush=True)
    finish(figures, args.json, "numpy", "scipy")


def predict_figure(table: CostTable) -> Figure:
    loads = random_loads(NUM_LOADS)
    arrays, model = tuple(np.array(loads).T), CostModel([table])
    took_s = _median_s(lambda: model.module_seconds("llm", *arrays, num_layers=NUM_LAYERS, edge=True), repeats=20)

    def one_by_one() -> None:
        for load in loads:
            for terms in (table.forward_s, table.backward_s):
                cost_of_one_load(terms, *load, num_layers=NUM_LAYERS, edge=True)

    name = f"forward and backward of {NUM_LOADS} loads, {len(CURVE.layer_knots)} knots"
    return Figure(name, took_s, 0.05, "load by load", _median_s(one_by_one, repeats=3), 10.0)


def fit_figure(table: CostTable) -> Figure:
    rng = np.random.default_rng(0)
    probes = [
        dataclasses.replace(probe, forward_s=probe.forward_s * rng.lognormal(0.0, 0.02))
        for load in random_loads(NUM_PROBES // 2)
        for probe in (make_probe(table, depth, *load) for depth in (1, 2))
    ]
    took_s = _median_s(lambda: fit_cost_tables(probes, make_specs()), repeats=5)
    (fitted,) = fit_cost_tables(probes, make_specs())
    note = f"{len(fitted.forward_s.layer_knots)} knots, median error {fitted.median_error_frac:.2%}"
    return Figure(f"fit of {len(probes)} probes, folds included", took_s, 2.0, "", None, None, note)


def _median_s(work: Callable[[], object], repeats: int) -> float:
    """Median wall time after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
