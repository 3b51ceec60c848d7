"""Costs and plans: fits, predictions, the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel
from dflop.plan.enumerate import best_choices
from dflop.plan.formula import formula_table
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem, SearchSpace
from dflop.schedule.items import module_items
from tests.bench.growth.part import Part, Work
from tests.bench.plan.__main__ import problem_of
from tests.builders import make_probe, make_specs, make_table, random_batch, random_loads

MODEL = "llava_onevision_qwen2_5_7b"


def fit(size: int, _folder: Path) -> Work:
    rng, truth = np.random.default_rng(0), make_table("llm")
    probes = [
        replace(probe, forward_s=probe.forward_s * rng.lognormal(0.0, 0.02))
        for load in random_loads(size // 2)
        for probe in (make_probe(truth, depth, *load) for depth in (1, 2))
    ]
    return lambda: fit_cost_tables(probes, make_specs())


def predict(size: int, _folder: Path) -> Work:
    model = CostModel([make_table("llm")])
    loads = np.tile(np.array(random_loads(1000)).T, size // 1000)
    return lambda: model.module_seconds("llm", *loads, num_layers=28, edge=True)


def items(size: int, _folder: Path) -> Work:
    batch = random_batch(size, seed=2)
    return lambda: module_items(batch, "vision")


def problem(*, num_nodes: int = 2, batch_size: int = 64, num_batches: int = 2) -> Problem:
    return replace(problem_of(MODEL, num_nodes, batch_size, num_batches), space=SearchSpace(microbatches=(8, 16)))


def by_gpus(size: int, _folder: Path) -> Work:
    """The formula's part: how many layouts there are depends on the cluster, what is simulated of them does not."""
    given = problem(num_nodes=size, batch_size=512)
    return lambda: best_choices(formula_table(given, 16), 15)


def whole_by_gpus(size: int, _folder: Path) -> Work:
    return lambda: plan_problem(problem(num_nodes=size, batch_size=512, num_batches=1), top=4)


def whole_by_batch(size: int, _folder: Path) -> Work:
    given = problem(batch_size=size)
    return lambda: plan_problem(replace(given), top=4)


def whole_by_scenarios(size: int, _folder: Path) -> Work:
    given = problem(num_batches=size)
    return lambda: plan_problem(replace(given), top=4)


PARTS = (
    Part("fit of costs by probes", (40, 400, 4_000), fit, 1.0, "least squares over a fixed number of slopes",),
    Part("prediction of costs by microbatches", (10_000, 100_000, 1_000_000), predict, 1.2,
         "one formula per load; arrays that no cache holds take longer per load"),
    Part("items of a batch by samples", (100, 1_000, 10_000), items, 1.0, "one pass over samples"),
    Part("planner's formula by nodes of 8 GPUs", (1, 10, 100), by_gpus, 1.5,
         "layouts of two modules: pairs of degrees, of which a cluster of n has about n log n, pruned by bounds"),
    Part("whole planner by nodes of 8 GPUs", (1, 10, 100), whole_by_gpus, 1.0,
         "as many plans are simulated; each has at most as many replicas as GPUs"),
    Part("whole planner by samples of a global batch", (16, 160, 1_600), whole_by_batch, 1.0,
         "the scheduler's budget is counted in operations"),
    Part("whole planner by sampled batches", (1, 10, 100), whole_by_scenarios, 1.0, "each is simulated"),
)  # fmt: skip
