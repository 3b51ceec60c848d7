"""The assignment program as the reference states it, for CP-SAT: an instance on stdin, what became of it on stdout.

Every sample in one bucket, no bucket empty, the largest load over buckets and modules as small as possible. Runs with
ortools on its path and nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ortools.sat.python import cp_model

UNITS = 100_000
"""Whole numbers stand for seconds: the largest weight becomes so many."""


def solve(weights_s: list[list[float]], num_buckets: int, limit_s: float, num_workers: int) -> dict[str, Any]:
    started = time.perf_counter()
    unit_s = max(max(row) for row in weights_s) / UNITS
    weights = [[round(seconds / unit_s) for seconds in row] for row in weights_s]
    model = cp_model.CpModel()
    in_bucket = [[model.new_bool_var("") for _ in range(num_buckets)] for _ in weights]
    largest = model.new_int_var(0, max(sum(column) for column in zip(*weights, strict=True)), "")
    for row in in_bucket:
        model.add_exactly_one(row)
    for b in range(num_buckets):
        model.add_at_least_one(row[b] for row in in_bucket)
        for column in zip(*weights, strict=True):
            model.add(sum(w * row[b] for w, row in zip(column, in_bucket, strict=True) if w) <= largest)
    model.minimize(largest)
    built = time.perf_counter()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = num_workers
    status = solver.solve(model)
    solved = time.perf_counter()
    bucket, objective_s = None, None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        bucket = [next(b for b, x in enumerate(row) if solver.boolean_value(x)) for row in in_bucket]
        loads = [[0.0] * len(weights_s[0]) for _ in range(num_buckets)]
        for b, row in zip(bucket, weights_s, strict=True):
            loads[b] = [load + seconds for load, seconds in zip(loads[b], row, strict=True)]
        objective_s = max(max(load) for load in loads)
    return {
        "status": solver.status_name(status),
        "bucket": bucket,
        "objective_s": objective_s,
        "build_s": built - started,
        "solve_s": solved - built,
    }


if __name__ == "__main__":
    json.dump(solve(**json.load(sys.stdin)), sys.stdout)
