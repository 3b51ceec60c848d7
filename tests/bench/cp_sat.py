"""The reference's assignment program under CP-SAT: every sample in one bucket, no bucket empty, the largest load over
buckets and modules as small as possible.

Run as a script it solves an instance from stdin with ortools on its path and nothing of ours, for that solver and
cvxpy's cannot share a process; `cp_sat` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.cost.model import Floats

UNITS = 100_000
"""Whole numbers stand for seconds: the largest weight becomes so many."""


def cp_sat(weights_s: Floats, num_buckets: int, limit_s: float, num_workers: int) -> dict[str, Any]:
    """status, bucket and objective_s (None without a solution), build_s, solve_s; without ortools a status alone."""
    from tests.bench.command import ORTOOLS

    if not ORTOOLS.is_dir():
        return {"status": "not installed"}
    instance = {"weights_s": weights_s.tolist(), "num_buckets": num_buckets, "limit_s": limit_s}
    done = subprocess.run(
        [sys.executable, "-P", __file__],  # without -P, pandas would find this folder's modules
        input=json.dumps({**instance, "num_workers": num_workers}),
        env=os.environ | {"PYTHONPATH": str(ORTOOLS)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def solve(weights_s: list[list[float]], num_buckets: int, limit_s: float, num_workers: int) -> dict[str, Any]:
    from ortools.sat.python import cp_model

    started = time.perf_counter()
    unit_s = max(max(row) for row in weights_s) / UNITS
    columns = [[round(seconds / unit_s) for seconds in column] for column in zip(*weights_s, strict=True)]
    model = cp_model.CpModel()
    in_bucket = [[model.new_bool_var("") for _ in range(num_buckets)] for _ in weights_s]
    largest = model.new_int_var(0, max(map(sum, columns)), "")
    for row in in_bucket:
        model.add_exactly_one(row)
    for members in zip(*in_bucket, strict=True):
        model.add_at_least_one(members)
        for column in columns:
            model.add(sum(w * x for w, x in zip(column, members, strict=True) if w) <= largest)
    model.minimize(largest)
    built = time.perf_counter()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = num_workers
    status = solver.solve(model)
    found: dict[str, Any] = {"status": solver.status_name(status), "bucket": None, "objective_s": None}
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found["bucket"] = [next(b for b, x in enumerate(row) if solver.boolean_value(x)) for row in in_bucket]
        loads = [[0.0] * len(columns) for _ in range(num_buckets)]
        for b, row in zip(found["bucket"], weights_s, strict=True):
            loads[b] = [load + seconds for load, seconds in zip(loads[b], row, strict=True)]
        found["objective_s"] = max(map(max, loads))
    return {**found, "build_s": built - started, "solve_s": time.perf_counter() - built}


if __name__ == "__main__":
    json.dump(solve(**json.load(sys.stdin)), sys.stdout)
