"""What the formula's part of planning takes, on this machine: `python -m tests.bench.plan [--json FILE]`.

CPU seconds of one process on one core. First the whole planner on 6 sampled batches: formula, scheduler and simulator,
ranking. Then its parts for all 27 numbers of microbatches up to 64 and 16 batches: tables of all candidates that fit,
with the exact enumeration of the best 15 choices, then inline drafts. Beside the enumeration of one number of
microbatches stands the mixed-integer program, which must find the same optimum. Costs are analytic
(A100 data sheet), samples are drawn; nothing here says anything about a real machine's step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dflop import resources
from dflop.config import load_model
from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs
from dflop.cost.devices import A100
from dflop.cost.model import CostModel
from dflop.models import load_rules
from dflop.plan.enumerate import best_choices
from dflop.plan.formula import FormulaTable, formula_table
from dflop.plan.inline import inline_choices
from dflop.plan.milp import solve_milp
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import ClusterSpec, Plan, SampleShape
from tests.bench.command import keep_to, options
from tests.bench.figures import Figure, finish, line
from tests.builders import make_sample

CASES = (
    ("SigLIP + Qwen2.5-7B", "llava_onevision_qwen2_5_7b", 128, 1024, 4.0, 10.0),
    ("Qwen2.5-Omni-7B", "qwen2_5_omni_7b", 32, 512, 30.0, 60.0),
)
"""Name, file of the model, nodes of 8 GPUs, samples of a global batch, bounds of the enumeration and of the whole
planner in CPU seconds."""
NUM_PLANNED = 6
NUM_SCENARIOS, TOP, MILP_AT = 16, 15, 8


def main() -> None:
    parser = options(__doc__)
    args = parser.parse_args()
    keep_to(1)
    figures = []
    for name, model, num_nodes, batch_size, bound_s, planner_bound_s in CASES:
        problem = problem_of(model, num_nodes, batch_size)
        for figure in figures_of(f"{name}, {problem.cluster.num_processes} GPUs", problem, bound_s, planner_bound_s):
            figures.append(figure)
            print(line(figure), flush=True)
    finish(figures, args.json, "numpy", "cvxpy")


def problem_of(model: str, num_nodes: int, batch_size: int, num_batches: int = NUM_SCENARIOS) -> Problem:
    config = load_model(resources.path("configs") / "models" / f"{model}.yaml")
    specs = load_rules(config.family, config.hf_config, config.media).specs()
    links = analytic_link_costs(A100, num_nodes=num_nodes, num_processes_per_node=8, profile_key="")
    return Problem(
        run_id="bench",
        specs=specs,
        cluster=ClusterSpec("bench", "slurm", num_nodes, 8, A100.memory_bytes, "cuda", 64),
        cost=CostModel(analytic_cost_tables(specs, A100, profile_key=""), specs=specs, links=links, extrapolate=True),
        batches=tuple(batch_of([s.module for s in specs[:-1]], batch_size, seed) for seed in range(num_batches)),
        global_batch_size=batch_size,
        snapshot_seq=0,
    )


def batch_of(encoders: list[str], num_samples: int, seed: int) -> tuple[SampleShape, ...]:
    """Texts of some 250 tokens, and 0 to 3 items of each encoder of some 1,500 tokens; all lognormal."""
    rng, samples = np.random.default_rng(seed), []
    for index in range(num_samples):
        media = [
            (encoder, int(np.clip(rng.lognormal(7.3, 0.8), 200, 20_000)))
            for encoder in encoders
            for _ in range(rng.choice(4, p=[0.4, 0.35, 0.15, 0.1]))
        ]
        samples.append(make_sample(index, int(np.clip(rng.lognormal(5.5, 1.0), 20, 8000)), media, 50))
    return tuple(samples)


def whole_figure(name: str, problem: Problem, bound_s: float) -> Figure:
    """The planner as `dflop plan` calls it."""
    given = replace(problem, batches=problem.batches[:NUM_PLANNED])
    plan_problem(
        replace(given, cluster=replace(given.cluster, num_nodes=1), batches=(given.batches[0][:64],))
    )  # compile
    plans: list[Plan] = []
    wall_s = -time.perf_counter()
    took_s = _cpu_s(lambda: plans.extend(plan_problem(given)))
    wall_s += time.perf_counter()
    note = f"wall {wall_s:.1f} s; {len(plans)} plans simulated; {plans[0].reason}"
    return Figure(f"{name}: whole planner", took_s, bound_s, "", None, None, note)


def figures_of(name: str, problem: Problem, bound_s: float, planner_bound_s: float) -> list[Figure]:
    counts = [m for m in problem.microbatch_choices if m <= 64]
    tables: dict[int, FormulaTable] = {}
    load_s = _cpu_s(lambda: (problem.loads, problem.sample_loads, problem.heaviest_samples))
    tables_s = _cpu_s(lambda: tables.update({m: formula_table(problem, m) for m in counts}))
    enumeration_s = _cpu_s(lambda: [best_choices(t, TOP) for t in tables.values()])
    sizes = " x ".join(
        f"{statistics.median(len(t.modules[k].candidates) for t in tables.values()):.0f}"
        for k in range(len(problem.specs))
    )
    choices = statistics.median(t.num_choices for t in tables.values())
    note = f"tables {tables_s:.2f}, enumeration {enumeration_s:.2f}; {sizes} candidates, {choices:.1e} choices each"
    found = [whole_figure(name, problem, planner_bound_s)]
    found.append(Figure(f"{name}: loads of {NUM_SCENARIOS} batches", load_s, None, "", None))
    found.append(Figure(f"{name}: {len(counts)} counts", tables_s + enumeration_s, bound_s, "", None, None, note))
    inline_s = _cpu_s(lambda: [inline_choices(problem, m, TOP) for m in counts])
    found.append(Figure(f"{name}: inline drafts", inline_s, None, "", None))
    return [*found, program_figure(name, tables[MILP_AT])]


def program_figure(name: str, table: FormulaTable) -> Figure:
    """Enumeration and program on one table."""
    best, program = best_choices(table, 1), []
    enumeration_s = _cpu_s(lambda: best_choices(table, TOP))
    program_s = _cpu_s(lambda: program.append(solve_milp(table)))
    assert program[0] is not None, "the program found nothing"
    deviation = table.objective(program[0]) / best[0][0] - 1.0
    note = f"the program's choice is {deviation:.1e} above the optimum"
    return Figure(f"{name}: one count", enumeration_s, None, "program", program_s, None, note)


def _cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
