"""The engine on this machine: `python -m tests.bench.engine [--json FILE] [--sizes TABLE | --data DATASET]`.

Two processes, a core each, gloo between them; a small Qwen2.5-Omni thinker trains global batches of real shapes.
`overhead`: per microbatch of a vision | llm plan, what the engine costs beside the modules it runs, and the same
modules in a bare loop of one process. `race`: step time of the engine (inline dp2, and vision | llm, in arrival order
and scheduled) beside Hugging Face alone in two data-parallel processes, same global batches, taking turns. `stall`: how
long a checkpoint holds up training, asynchronous and not. Ratios above 1 are in the engine's favour.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflop.jobs.talk import say
from dflop.records import Measurement
from tests.bench.command import become_a_job, in_ranks, options
from tests.bench.engine import overhead, race, samples, stall
from tests.bench.engine.samples import Workload
from tests.bench.figures import conclude

PARTS = ("overhead", "race", "stall")
SPLIT = "engine, vision | llm, arrival"
INLINE = "engine, inline dp2, arrival"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_batches: int
    num_samples: int
    num_microbatches: int
    num_rounds: int
    num_checkpoints: int
    budget_s: float
    """Of the probes that the scheduler's costs come from."""


FULL = Size(num_batches=5, num_samples=16, num_microbatches=8, num_rounds=3, num_checkpoints=10, budget_s=20.0)
TINY = Size(num_batches=2, num_samples=4, num_microbatches=2, num_rounds=1, num_checkpoints=1, budget_s=1.0)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated rows without")
    parser.add_argument("--data", type=Path, help="folder of a dataset with real media, instead of a table")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tiny", action="store_true", help="far too little to say anything, in seconds")
    args = parser.parse_args()
    become_a_job("tests.bench.engine", OMP_NUM_THREADS="1")
    started, size = time.perf_counter(), TINY if args.tiny else FULL
    if args.data:
        workload, rows = samples.real(args.data, size.num_batches, size.num_samples), "a dataset's, with its media"
    else:
        workload = samples.drawn(args.sizes, size.num_batches, size.num_samples)
        rows = "drawn from a table of real sizes, media made up" if args.sizes else "generated, media made up"
    found = run(workload, size, args.part)
    say(f"{time.perf_counter() - started:.0f} s")
    conclude({"samples": rows, "size": asdict(size), **found}, [], args.json, "torch", "transformers")


def run(workload: Workload, size: Size, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Measures the parts, prints their figures and returns them by part."""
    say(f"probing the model for {size.budget_s:g} s")
    probes: list[Measurement] = in_ranks(race.probe, race.NUM_RANKS, workload, size.budget_s)[0]
    job = race.make_job(workload, probes, size.num_microbatches, size.num_rounds)
    found = {"overhead": _overhead, "race": _race, "stall": _stall}
    return {part: found[part](job, size) for part in parts}


def _overhead(job: race.Job, size: Size) -> dict[str, Any]:
    plan, step_plans = job.plans[SPLIT]
    ranks: list[overhead.Split] = in_ranks(
        overhead.measure, race.NUM_RANKS, job.workload, plan, step_plans, size.num_rounds
    )
    modules = [overhead.overhead(m, r.steps) for m, r in zip(overhead.MODULE_OF_RANK, ranks, strict=True)]
    print(f"engine overhead per microbatch, thread CPU time, {SPLIT}")
    for m in modules:
        parts = {"sends, receives": m.bookkeeping_s, "copies": m.copies_s, "python": m.python_s}
        told = ", ".join(f"{name} {1e6 * s:.0f}" for name, s in parts.items())
        print(
            f"  {m.module:6s} {1e6 * m.overhead_s:5.0f} us ({told}) beside {1e3 * m.modules_s:.1f} ms: "
            f"{m.overhead_frac:.2%}"
        )
    engine_s = sum(statistics.mean(s.process_cpu_s for s in r.steps) for r in ranks)
    bare_s = statistics.mean(ranks[0].bare_cpu_s)
    print(f"  CPU seconds of a step, both processes with all threads / bare loop in one: {engine_s / bare_s:.4f}")
    return {
        "modules": [asdict(m) | {"overhead_s": m.overhead_s, "overhead_frac": m.overhead_frac} for m in modules],
        "step_cpu_s": engine_s,
        "bare_loop_cpu_s": bare_s,
        "engine / bare loop": engine_s / bare_s,
    }


def _race(job: race.Job, size: Size) -> dict[str, Any]:
    by_rank = in_ranks(race.race, race.NUM_RANKS, job)
    rounds = [
        [{n: [rank[n] for rank in ranks] for n in ranks[0]} for ranks in zip(*of_round, strict=True)]
        for of_round in zip(*by_rank, strict=True)
    ]
    print(f"step time, {size.num_batches} global batches of {size.num_samples} samples, {size.num_rounds} rounds")
    names = list(rounds[0][0])
    step_s = {name: race.mean_step_s(rounds, name) for name in names}
    for name, seconds in step_s.items():
        print(f"  {name:34s} {seconds:6.3f} s")
    ratios = [race.ratio(rounds, plain, name) for name in job.plans for plain in race.NUM_SIDE_BY_SIDE]
    for r in ratios:
        print(
            f"  {r.slower} / {r.faster}: {r.wall:.3f} (x/ {r.wall_spread:.3f} over batches, noise {r.noise_frac:.0%}), "
            f"CPU time {r.cpu:.3f}"
        )
    return {"step_s": step_s, "ratios": [asdict(r) for r in ratios]}


def _stall(job: race.Job, size: Size) -> dict[str, Any]:
    plan, step_plans = job.plans[INLINE]
    ranks: list[stall.Stall] = in_ranks(
        stall.measure, race.NUM_RANKS, job.workload, plan, step_plans, size.num_checkpoints
    )
    held = max((stall.figures(r) for r in ranks), key=lambda f: f["asynchronous_s"])
    ratio = held["synchronous / asynchronous"]
    print(
        f"checkpoint of {held['state_bytes'] / 1e6:.0f} MB, {size.num_checkpoints} times: training is held "
        f"{1e3 * held['asynchronous_s']:.0f} ms, {1e3 * held['synchronous_s']:.0f} ms synchronous ({ratio:.1f}x); "
        f"step {held['step_s']:.3f} s, beside a write {held['step_beside_write_s']:.3f} s"
    )
    return held


if __name__ == "__main__":
    main()
