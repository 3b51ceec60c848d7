"""Whole steps of many GPUs out of stage times of one: `python -m tests.bench.replay --times FILE [--sizes PARQUET]`.

The seconds of every stage come from a device (`python -m tests.gpu.real_steps`), not from a data sheet; how they
compose into a step of 8 or 64 GPUs is simulated, links and gradient synchronisation are those of the data sheet.
Nothing here was measured on a cluster. Compared are, on batches that no plan has seen: the best data-blind plan with
one layout for the whole model, our layout with data-blind batches, and our layout with our batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dflop.data.shapes import ShapeRules
from dflop.data.sizes import profile_sizes, read_sizes
from dflop.errors import DataError
from dflop.jobs.suite.judge import judge, speedup
from dflop.jobs.suite.mixtures import MAIN, draw_batches
from dflop.models.family import Family
from dflop.models.media import Layout
from dflop.plan.baselines.uniform import tuned_uniform
from dflop.plan.rank import arrival_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import ClusterSpec, Plan, SampleShape
from dflop.records.mapping import from_dict
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.replay.times import NUM_GPUS_PER_NODE, Times

LABEL = "measured stage times, simulated composition"
SAMPLES_PER_GPU, NUM_PLANNED, NUM_UNSEEN = 8, 4, 8
MAX_LLM_TOKENS = 16_384
Batch = tuple[SampleShape, ...]


@dataclass(frozen=True)
class Outcome:
    """Simulated seconds of a step on unseen batches."""

    num_gpus: int
    blind_s: float
    """Best plan with one layout for the whole model, batches in arrival order."""
    layout_s: float
    """Our layout, batches in arrival order."""
    ours_s: float
    speedup: float
    """Over the data-blind plan: geometric mean over batches."""
    low: float
    high: float
    """Its 95 % interval."""
    plan: str


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--times", type=Path, required=True, help="MODEL.parquet of tests.gpu.real_steps")
    parser.add_argument("--sizes", type=Path, help="table of sizes (dflop/data/sizes.py); default: a drawn mixture")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64], help="multiples of 8")
    parser.add_argument("--samples-per-gpu", type=int, default=SAMPLES_PER_GPU, help="of a global batch")
    args = parser.parse_args()
    times = Times(args.times)
    told = {key: value for key, value in times.told.items() if key != "model"}
    print(f"{LABEL}: {times.path.stem} on {told['hardware']}; {told['software']}; links of {times.device.name}")
    if told["memory_bytes"] is None:
        print("  times of one core of a CPU, a rehearsal: they say nothing about any GPU")
    stages = list(times.stage_errors())
    for module, num_layers, ratio in stages:
        print(f"  a stage of {num_layers} layers of {module}: measured / composed of its layers {ratio:.2f}")
    found = []
    for num_gpus in args.gpus:
        found.append(replay(times, args.sizes, num_gpus, args.samples_per_gpu))
        print(line(found[-1]), flush=True)
    outcomes = [asdict(outcome) for outcome in found]
    conclude({"label": LABEL, **told, "stages": stages, "outcomes": outcomes}, [], args.json, "numba", "cvxpy")


def line(found: Outcome) -> str:
    return (
        f"{found.num_gpus} GPUs: data-blind {found.blind_s:.3f} s, our layout with data-blind batches "
        f"{found.layout_s:.3f} s, ours {found.ours_s:.3f} s a step; {found.speedup:.2f} times as fast "
        f"({found.low:.2f} to {found.high:.2f}); {found.plan}"
    )


def replay(times: Times, sizes: Path | None, num_gpus: int, samples_per_gpu: int) -> Outcome:
    """Plan for a cluster of so many of the device and simulate unseen batches."""
    size = num_gpus * samples_per_gpu
    batches = batches_of(times.family, sizes, size, NUM_PLANNED + NUM_UNSEEN)
    problem = problem_of(times, num_gpus, size, batches[:NUM_PLANNED])
    ours = plan_problem(problem)[0]
    blind = tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan))
    assert blind is not None, "our plan fits, so some uniform plan does"

    def steps(plan: Plan, policy: str) -> tuple[float, ...]:
        return judge(plan, batches[NUM_PLANNED:], problem.cost, problem.cluster, policy).step_s

    blind_s, layout_s, ours_s = steps(blind, "arrival"), steps(ours, "arrival"), steps(ours, "balanced")
    gain = speedup(blind_s, ours_s)
    means = (float(np.mean(seconds)) for seconds in (blind_s, layout_s, ours_s))
    return Outcome(num_gpus, *means, gain.mean, gain.low, gain.high, told_plan(ours))


def told_plan(plan: Plan) -> str:
    degrees = (f"{m.module} tp{m.parallel.tp} pp{m.parallel.pp} dp{m.parallel.dp}" for m in plan.modules)
    return f"{plan.layout}, {'; '.join(degrees)}, {plan.num_microbatches} microbatches"


def problem_of(times: Times, num_gpus: int, global_batch_size: int, batches: Sequence[Batch]) -> Problem:
    num_nodes, rest = divmod(num_gpus, NUM_GPUS_PER_NODE)
    if rest or not num_nodes:
        raise ValueError(f"{num_gpus} GPUs are no whole nodes of {NUM_GPUS_PER_NODE}")
    return Problem(
        run_id="replay",
        specs=times.family.specs(),
        cluster=ClusterSpec(
            f"{num_gpus} GPUs", "slurm", num_nodes, NUM_GPUS_PER_NODE, times.memory_bytes, "cuda", 128
        ),
        cost=times.cost(num_nodes),
        batches=tuple(batches),
        global_batch_size=global_batch_size,
        snapshot_seq=0,
    )  # fmt: skip


def batches_of(family: Family, sizes: Path | None, size: int, count: int) -> list[Batch]:
    """Global batches: drawn with replacement from a table of sizes, or from the generated mixture."""
    if sizes is None and not {"image", "video"} <= family.media_tokens.keys():
        raise DataError(f"the generated mixture has pictures, `{family.name}` takes none", hint="give --sizes")
    if sizes is None:
        return list(
            draw_batches(
                family, MAIN, max_llm_tokens=MAX_LLM_TOKENS, global_batch_size=size, num_batches=count, seed=0
            )
        )  # fmt: skip
    rules = ShapeRules("replay", family, _NoTokenizer(), MAX_LLM_TOKENS, ("shrink",))  # type: ignore[arg-type]  # never asked for tokens
    rows = profile_sizes(read_sizes(sizes), rules)[0]
    if rows.is_empty():
        raise DataError("no sample of the table can be used", where=str(sizes))
    rng = np.random.default_rng(0)
    drawn = [rows[rng.integers(0, len(rows), size).tolist()].to_dicts() for _ in range(count)]
    return [tuple(from_dict(SampleShape, {**row, "sample_index": i}) for i, row in enumerate(batch)) for batch in drawn]


class _NoTokenizer:
    """A table counts the text; a template's few tokens do not matter here, nor what a marker is in tokens."""

    def template_tokens(self, num_turns: int) -> tuple[int, int]:
        return 0, 0

    def layout_tokens(self, layout: Layout) -> int:
        return sum(isinstance(part, str) for part in layout)


if __name__ == "__main__":
    main()
