"""Whole trainings against each other: `python -m tests.bench.endtoend [--full] [--media DIR] [--json FILE]`.

The demo's model is trained on the demo's data and, with --media, on a folder of real media, by 2 and by 4 processes.
`dflop` profiles data and modules, plans, packs every batch in a process at the same time as training and corrects
itself. The baselines train samples in arrival order, equally many to a microbatch: `tuned` has one layout for
the whole model, of all that fit the best by simulation on the same costs; `blind` is what dflop's planner finds where
every sample is the mean one (with fewer processes than modules there is none). Same initial weights, same global
batches in the same order: the losses must be equal to rounding. The trainings take turns, a step each:
`endtoend_turns.py`.

Batches differ far more than the trainings do, so steps are paired by batch and averaged as logarithms. The steps of one
seed share weights, plan and processes: they are one observation, and the interval is over seeds. One seed without
--full, which has no interval, and with --media two of the four pairs of data and processes.
"""

import asyncio
import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from dflop.compare.unseen_batches import judge
from dflop.data.demo import make_demo_dataset
from dflop.errors import InfeasiblePlanError
from dflop.launch.kernels import kernel_environment
from dflop.plan.rank import arrival_step_s
from dflop.plan.space import Problem
from dflop.plan.uniform import tuned_uniform
from dflop.records import Plan
from dflop.report.tables import layout_text
from dflop.run.batches import GlobalBatches
from dflop.run.directory import RunDir
from dflop.run.messages import say
from dflop.schedule.step_scheduler import schedule_step, warm
from dflop.steps import planning
from dflop.store.ingest import ingest
from tests.bench.blind import blind_plan
from tests.bench.command import become_a_job, options
from tests.bench.endtoend_turns import Taken, take_turns
from tests.bench.figures import conclude
from tests.bench.jobs import Profiled, configured, give_steps, observations, profiled_run
from tests.bench.markdown import table

DEMO, MEDIA, ANNOTATIONS, NUM_ROWS = "demo", "media", "llava_demo.jsonl", 320
TUNED, BLIND, OURS = "tuned", "blind", "dflop"
AGAINST = {TUNED: "one layout, tuned", BLIND: "planned for mean samples"}
PROCESSES = (2, 4)
NUM_WARM_UP_STEPS = 3
"""First steps, not counted: heaps grow, and corrections have seen nothing."""
MAX_LOSS_ERROR = 1e-4
"""Of float32 sums in another order, over as many updates as are trained here."""


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    num_seeds: int
    num_counted: int
    """Steps of a training that are counted."""
    global_batch_size: int
    profile_budget_s: float

    @property
    def num_steps(self) -> int:
        return NUM_WARM_UP_STEPS + self.num_counted + 1  # behind the last one is none whose data is prepared


SMALL, FULL = Size(1, 4, 16, 8.0), Size(5, 8, 24, 30.0)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--full", action="store_true", help="five seeds and more steps: an hour")
    parser.add_argument("--media", type=Path, help=f"folder of media with {ANNOTATIONS}; demo data alone without")
    args = parser.parse_args()
    become_a_job("tests.bench.endtoend", **kernel_environment(os.environ))
    size, bounds, seeds = FULL if args.full else SMALL, [], []
    pairs = list(itertools.product((DEMO, MEDIA) if args.media else (DEMO,), PROCESSES))
    if args.media and not args.full:
        pairs = [(DEMO, max(PROCESSES)), (MEDIA, min(PROCESSES))]
    warm()  # compiling is no part of planning
    for data, num_processes in pairs:
        with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
            for found in _trained(Path(folder), data, num_processes, args.media, size):
                seeds.append(found)
                error, name = found["largest_loss_error"], f"{data}, {num_processes} processes, seed {found['seed']}"
                bounds.append((f"{name}: losses differ by {error:.1g}", error <= MAX_LOSS_ERROR))
    print("\n\n".join(tables({"seeds": seeds, "machine": {"num_cores": os.cpu_count()}}).values()))
    conclude({"settings": vars(size), "seeds": seeds}, bounds, args.json, "torch", "transformers", "numba")


def _trained(folder: Path, data: str, num_processes: int, media: Path | None, size: Size) -> Iterator[dict[str, Any]]:
    """Figures of one seed after the other; they share a profile."""
    make_demo_dataset(folder / "data", NUM_ROWS)
    annotations, overrides = folder / "data" / "annotations.jsonl", []
    if data == MEDIA:
        # Fewer rows than the demo has: each occurs several times, so that no global batch is the small rest of an
        # epoch. The tokenizer is the demo's: a vocabulary of 150 000 would make the head most of the model.
        assert media is not None
        rows = [json.loads(line) for line in (media / ANNOTATIONS).read_text().splitlines()]
        repeated = enumerate(itertools.islice(itertools.cycle(rows), NUM_ROWS))
        annotations = folder / "media.jsonl"
        annotations.write_text("".join(json.dumps(row | {"id": f"{row['id']}-{n}"}) + "\n" for n, row in repeated))
        overrides = [f"dataset.media_root={media.absolute()}"]
    say(f"{data}, {num_processes} processes: profiles")
    profiled = asyncio.run(
        profiled_run(
            folder, annotations, num_processes, *overrides, f"plan.global_batch_size={size.global_batch_size}",
            f"model_profile.budget_s={size.profile_budget_s}", "dataset.max_llm_tokens=4096",
            "data_profile.max_bad_frac=0.05",  # a clip of the media folder is a breath longer than the encoder takes
            "train.checkpoint_every=1000000", "train.timeout_s=600",
        )
    )  # fmt: skip
    for seed in range(size.num_seeds):
        say(f"{data}, {num_processes} processes, seed {seed}")
        own = folder / f"seed-{seed}"
        case = {"data": data, "num_processes": num_processes, "seed": seed}
        yield case | _of_seed(profiled, own, seed, size, num_processes)
        shutil.rmtree(own)


def _of_seed(profiled: Profiled, folder: Path, seed: int, size: Size, num_processes: int) -> dict[str, Any]:
    """Plan and train everything that is compared; what was seen, steps in order."""
    settings = (f"train.seed={seed}", f"model.seed={seed}", f"train.num_steps={size.num_steps}")
    ours = configured(profiled.run, folder / OURS, *settings)
    config, began_s = ours.config(), time.perf_counter()
    task = planning.run_task(ours, config, profiled.key, say)
    plan = planning.find_plans(task, config, say).plans[0]
    planning.keep_plans(ours, config, task, [plan])
    ingest(config.store)
    plan_s = time.perf_counter() - began_s
    drawn = GlobalBatches(config, ours.shapes())
    batches = [tuple(drawn.at(step)) for step in range(size.num_steps)]
    runs, plans = {OURS: ours}, {OURS: plan}
    for name, data_blind in data_blind_plans(task.problem).items():
        runs[name], plans[name] = configured(profiled.run, folder / name, *settings), data_blind
        _give(runs[name], data_blind, task.problem, batches)
    taken = take_turns({name: (run, name != OURS) for name, run in runs.items()}, size.num_steps)
    seen = {name: observations(run) for name, run in runs.items()}
    losses = np.array([[of[step, 0].loss for step in range(size.num_steps)] for of in seen.values()])
    counted = slice(NUM_WARM_UP_STEPS, NUM_WARM_UP_STEPS + size.num_counted)
    arms = {}
    for name, of_arm in plans.items():
        simulated = judge(
            of_arm, batches, task.problem.cost, task.problem.cluster, "balanced" if name == OURS else "arrival"
        )  # fmt: skip
        busy_s = np.zeros(size.num_steps)
        for (step, _), o in seen[name].items():
            busy_s[step] += sum(s.forward_compute_s + s.backward_compute_s for s in o.spans)
        arms[name] = _arm(of_arm, taken[name], simulated.step_s[counted], busy_s[counted], num_processes)
    return {
        "num_llm_tokens": [sum(s.num_llm_tokens for s in batch) for batch in batches[counted]],
        "setup": {"profile_s": profiled.profile_s, "plan_s": plan_s},
        "largest_loss_error": float(np.abs(losses / losses[0] - 1).max()),
        "arms": arms,
    }  # fmt: skip


def data_blind_plans(problem: Problem) -> dict[str, Plan]:
    """By name; a plan that does not exist is left out.

    Raises:
        InfeasiblePlanError: no uniform plan fits.
    """
    tuned = tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan))
    if tuned is None:
        raise InfeasiblePlanError(f"no uniform plan fits on {problem.cluster.name}")
    try:
        return {TUNED: tuned, BLIND: blind_plan(problem)}
    except InfeasiblePlanError:
        return {TUNED: tuned}


def _give(run: RunDir, plan: Plan, problem: Problem, batches: Sequence[Any]) -> None:
    """The plan, and arrival order for every batch."""
    run.write_plan(plan, planning.tables_of(plan, problem.cost))
    steps = [
        schedule_step(
            run_id=run.run_id, step=step, plan=plan, batch=batch, cost=problem.cost, policy="arrival",
            max_concurrency=problem.cluster.max_concurrency,
        )
        for step, batch in enumerate(batches)
    ]  # fmt: skip
    give_steps(run, steps)


def _arm(
    plan: Plan, taken: Taken, simulated_s: Sequence[float], busy_s: np.ndarray, num_processes: int
) -> dict[str, Any]:
    """Idle is the share of the processor time that processes could have had, a core each as long as there are any, and
    in which they did not run forward or backward."""
    counted = slice(NUM_WARM_UP_STEPS - 1, None)  # the first step is nobody's turn
    step_s = np.array(taken.step_s[counted])
    return {
        "plan": {"layout": layout_text(plan), "num_microbatches": plan.num_microbatches},
        "step_s": step_s.tolist(), "cpu_s": taken.cpu_s[counted], "simulated_s": list(simulated_s),
        "idle_frac": (1 - busy_s / (step_s * min(num_processes, os.cpu_count() or 1))).tolist(),
        "peak_bytes": taken.peak_bytes,
    }  # fmt: skip


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`endtoend`: how much faster."""
    num_cores, ratios = content["machine"]["num_cores"], []
    for (data, n), of_case in itertools.groupby(content["seeds"], key=lambda s: (s["data"], s["num_processes"])):
        seeds = list(of_case)
        head = (data, f"{n} on {num_cores} cores" if n > num_cores else str(n))
        for against in dict.fromkeys(name for s in seeds for name in s["arms"] if name != OURS):
            of = [s for s in seeds if against in s["arms"]]  # a seed without such a plan does not count
            ratios.append((*head, AGAINST[against], *_ratio_cells(of, against)))
    return {
        "endtoend": table(
            ("data", "processes", "baseline", "step, baseline / dflop", "simulated before", "processor time",
             "seeds", "profile and plan", "saved again after"),
            ratios,
        ),
    }  # fmt: skip


def _ratio_cells(seeds: Sequence[Mapping[str, Any]], against: str) -> tuple[str, ...]:
    def over_seeds(what: str, *, has_interval: bool = True) -> str:
        """Geometric mean with Student's 95 % interval of the mean logarithm, one ratio per seed."""
        logs = np.array([np.log(np.divide(s["arms"][against][what], s["arms"][OURS][what])).mean() for s in seeds])
        mean, n = logs.mean(), len(logs)
        if not has_interval or n < 2:
            return f"{math.exp(mean):.2f}x{' (single seed)' if has_interval else ''}"
        half = stdtrit(n - 1, 0.975) * logs.std(ddof=1) / math.sqrt(n)
        return f"{math.exp(mean):.2f}x ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"

    setup_s = np.mean([sum(s["setup"].values()) for s in seeds])
    saved_s = np.mean(_steps(seeds, against, "step_s")) - np.mean(_steps(seeds, OURS, "step_s"))
    after = f"{math.ceil(setup_s / saved_s)} steps" if saved_s > 0 else "never"
    simulated = over_seeds("simulated_s", has_interval=False)
    return over_seeds("step_s"), simulated, over_seeds("cpu_s"), str(len(seeds)), f"{setup_s:.0f} s", after


def _steps(seeds: Sequence[Mapping[str, Any]], name: str, what: str) -> list[float]:
    return [value for s in seeds for value in s["arms"][name][what]]


if __name__ == "__main__":
    main()
