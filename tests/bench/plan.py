"""What planning takes and how good it is: `python -m tests.bench.plan [--part planner|regret]`.

`planner`: CPU seconds of the whole planner on 6 sampled batches, one process on one core. `regret`: 20 problems on 8
and 16 GPUs; the planner's plan against the best of all feasible candidates, simulated with the scheduler that runs.
Costs are those of data sheets, samples are drawn: nothing here is a real machine's step.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflop import resources
from dflop.config import load_model
from dflop.cost.devices import A100, H200
from dflop.models import load_family
from dflop.plan.columns import Columns, combined
from dflop.plan.drafts import draft
from dflop.plan.grid_search import grids_apart, grids_with_llm, whole_depths
from dflop.plan.rank import thorough
from dflop.plan.search import optimize, plan_problem
from dflop.plan.space import Problem, SearchSpace
from dflop.plan.verdict import proven
from dflop.records import Plan, SampleShape
from dflop.report.tables import layout_text
from dflop.schedule.policies import StepJob
from tests.bench.cases import CASES, analytic_costs, cluster_of, make_setting, suite_family
from tests.bench.command import keep_to, options
from tests.bench.figures import Figure, conclude, finish
from tests.bench.instances import real_batch
from tests.bench.mixtures import MIXTURES
from tests.builders import make_sample

LARGE = (
    ("SigLIP + Qwen2.5-7B", "llava_onevision_qwen2_5_7b", 128, 1024, 10.0),
    ("Qwen2.5-Omni-7B", "qwen2_5_omni_7b", 32, 512, 60.0),
)
"""Name, file of the model, nodes of 8 GPUs, samples of a global batch, bound in CPU seconds."""
NUM_SCENARIOS = 6
NUM_PROBLEMS, SMALL_BATCH_SIZE, NUM_SMALL_BATCHES, MAX_REGRET = 20, 96, 2, 0.01
SHARES = {"text": 0.5, "image": 0.43, "video": 0.07}
SMALL_SPACE = SearchSpace(microbatches=(1, 2, 4, 8, 16))
"""On small clusters every feasible plan of it can be simulated."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", choices=("planner", "regret"), default="planner")
    parser.add_argument("--sizes", type=Path, help="table of real sample sizes, for a third of the problems of regret")
    args = parser.parse_args()
    keep_to(1)
    if args.part == "planner":
        finish((planner_figure(*case) for case in LARGE), args.json, "numpy", "cvxpy")
        return
    rows = []
    for name, problem in small_problems(args.sizes):
        rows.append({"instance": name, **regret(problem)})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    worst = max(row["regret_frac"] for row in rows)
    conclude(
        {"regret": rows},
        [(f"largest regret of the fastest plan: {worst:.4f}", worst <= MAX_REGRET)],
        args.json,
        "numpy",
        "numba",
        "cvxpy",
    )


def large_problem(model: str, num_nodes: int, batch_size: int) -> Problem:
    config = load_model(resources.path("configs") / "models" / f"{model}.yaml")
    family = load_family(config.family, config.hf_config, config.media)
    specs = family.specs()
    encoders = [s.module for s in specs[:-1]]
    return Problem(
        run_id="bench", specs=specs, cluster=cluster_of(A100, num_nodes),
        cost=analytic_costs(specs, A100, num_nodes, 1.0),
        batches=tuple(large_batch(encoders, batch_size, seed) for seed in range(NUM_SCENARIOS)),
        global_batch_size=batch_size, snapshot_seq=0,
    )  # fmt: skip


def large_batch(encoders: list[str], num_samples: int, seed: int) -> tuple[SampleShape, ...]:
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


def planner_figure(name: str, model: str, num_nodes: int, batch_size: int, bound_s: float) -> Figure:
    """The planner as `dflop plan` calls it."""
    problem = large_problem(model, num_nodes, batch_size)
    small = replace(problem, cluster=replace(problem.cluster, num_nodes=1), batches=(problem.batches[0][:64],))
    plan_problem(small)  # compiles
    start_s = time.process_time()
    planned = optimize(problem)
    took_s = time.process_time() - start_s
    note = "; ".join((f"{len(planned.plans)} plans simulated", *proven(planned.programs), planned.plans[0].reason))
    return Figure(f"{name}, {problem.cluster.num_processes} GPUs", took_s, bound_s, note=note)


def small_problems(sizes: Path | None) -> Iterator[tuple[str, Problem]]:
    """Problems on 8 and 16 H200 by turns, over models, mixtures and weights of the encoder."""
    mixtures = ("main", "heavy", *(("real",) if sizes else ()))
    for number in range(NUM_PROBLEMS):
        case, factor = CASES[number % 3], (0.5, 1.0, 4.0)[number // 6 % 3]
        mixture, num_nodes = mixtures[number // 3 % len(mixtures)], (1, 2)[number % 2]
        drawn_from = MIXTURES["main" if mixture == "real" else mixture]
        problem = make_setting(
            case, drawn_from, num_nodes=num_nodes, global_batch_size=SMALL_BATCH_SIZE, num_unseen=1, device=H200,
            encoder_factor=factor, space=SMALL_SPACE, draw=number,
        ).problem  # fmt: skip
        batches = problem.batches[:NUM_SMALL_BATCHES]
        if mixture == "real" and sizes:
            family = suite_family(case, drawn_from)
            batches = tuple(
                real_batch(family, SHARES, SMALL_BATCH_SIZE, case.max_llm_tokens, (number, seed), sizes)
                for seed in range(NUM_SMALL_BATCHES)
            )
        yield (
            f"{case.name}, {8 * num_nodes} x {H200.name}, {mixture}, encoder x{factor:g}",
            replace(problem, batches=batches),
        )


def regret(problem: Problem) -> dict[str, Any]:
    """How much longer than the best of all plans the fastest nominee and the chosen plan take."""
    found = plan_problem(problem, top=40)
    fastest = min(found, key=lambda p: p.predicted_step_s)
    seconds = [simulated_s(plan, problem) for plan in every_plan(problem)]
    return {
        "num_plans": len(seconds),
        "regret_frac": simulated_s(fastest, problem) / min(seconds) - 1,
        "chosen_frac": simulated_s(found[0], problem) / min(seconds) - 1,
        "layout": layout_text(found[0]),
    }


def every_plan(problem: Problem) -> Iterator[Plan]:
    """All feasible drafts of every layout."""
    names = [spec.module for spec in problem.specs]
    for m in problem.microbatch_choices:
        grids = [*grids_with_llm(whole_depths(problem, m)), *grids_apart(problem, m, math.inf)]
        columns = Columns.of(names, m, problem.cluster.num_processes, grids)
        for parts in columns.parts if columns is not None else ():
            covers = combined([np.flatnonzero(columns.subset == part) for part in parts])
            for value_s, cover in columns.best(covers, len(covers)):
                plan = draft(problem, m, columns.choices(cover), value_s)
                yield plan
                yield draft(problem, m, columns.choices(cover), value_s, per_microbatch=True)


def simulated_s(plan: Plan, problem: Problem) -> float:
    """Mean step of the planning batches; infinite where the scheduler cannot keep to the memory."""
    total_s = 0.0
    for batch, items in zip(problem.batches, problem.batch_items, strict=True):
        job = StepJob(plan, batch, problem.cost, items=items)
        _, assignment, seconds = job.best(thorough(problem))
        if not job.keeps_caps(assignment):
            return float("inf")
        total_s += seconds + plan.sync_s
    return total_s / len(problem.batches)


if __name__ == "__main__":
    main()
