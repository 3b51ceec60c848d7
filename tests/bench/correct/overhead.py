"""What watching and correcting take: `python -m tests.bench.correct --part overhead`. Processor time, on this machine.

The first part is a job of 16 ranks with 32 microbatches, whose ranks are made up; the scheduler's work is real. The
second is a job on two cores, where everything is real and steps are short: with corrections, and without.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflop.jobs.rundir import RunDir
from dflop.records import LLM, GateReading, MicrobatchSpan, StepObservation
from dflop.schedule.scheduler import schedule_step
from dflop.store.spool import read_spool
from dflop.train import wire
from dflop.train.wire import RankTimes, open_store
from tests.bench.correct import real_runs
from tests.bench.correct.real import configured, is_seen
from tests.bench.correct.real_runs import NUM_RANKS, Found, observations, slowest_s, step_s
from tests.builders import make_plan
from tests.jobs.test_learning import BATCH_SIZE, COST, SHAPES, Job

NUM_MICROBATCHES, NUM_STEPS, FIRST_COUNTED = 32, 16, 4
PLAN = make_plan({"vision": 8, LLM: 8}, num_microbatches=NUM_MICROBATCHES, global_batch_size=BATCH_SIZE)
REAL_STEPS = 60
SETTINGS = {"off": "correct.enabled=false", "auto": "correct.gate=auto"}
TARGET_FRAC = 0.01


def main(sizes: Path | None, seeds: Sequence[int]) -> Found:
    """Every seed is a pair of real jobs."""
    return real_runs.in_a_process_of_its_own(__name__, seeds)


def run(seeds: Sequence[int]) -> dict[str, Any]:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        rank_s = _rank_s()
        large = _large_job(Path(folder))
        print(f"a rank, {NUM_MICROBATCHES} microbatches: {rank_s * 1e6:.0f} us of its step")
        print("scheduler, 16 ranks: " + ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in large.items()))
        profiled = real_runs.profiled_run(Path(folder), is_seen, f"train.num_steps={REAL_STEPS}")
        jobs = []
        for seed in seeds:
            for arm, setting in SETTINGS.items():
                of = configured(profiled, Path(folder) / f"{seed}-{arm}", f"train.seed={seed}", setting)
                real_runs.train(of, "dflop.jobs.train", str(of.path), "train")
                jobs.append({"seed": seed, "corrections": arm, **_figures(of)})
                print(jobs[-1])
        return {"rank_s": rank_s, "scheduler_s": large, "target_frac": TARGET_FRAC, "jobs": jobs}


def _rank_s() -> float:
    """Processor seconds for which a rank is kept from its step."""
    spans = tuple(
        MicrobatchSpan(k, 3, 1000, 10**6, 0.01, 0.02, 0.1, 0.011, 0.2, 0.022, 0.0105, 0.0215)
        for k in range(NUM_MICROBATCHES)
    )
    seen = StepObservation(
        run_id="r", attempt=1, step=5, policy="balanced", rank=1, module=LLM, stage=0, dp_rank=1, predicted_step_s=1.0,
        step_s=1.0, busy_s=0.9, data_wait_s=0.0, schedule_wait_s=0.0, reduce_s=0.0, optimizer_s=0.0, loss=2.0,
        grad_norm=1.0, num_supervised_tokens=80, observed_at_s=1.0, spans=spans,
    )  # fmt: skip
    store = open_store("127.0.0.1", 0, is_server=True, timeout_s=20)
    return statistics.median(_processor_s(lambda: wire.send_times(store, RankTimes.of(seen))) for _ in range(200))


def _large_job(folder: Path) -> dict[str, float]:
    """Median processor seconds per step, by what they are spent on; one bucket of sizes is slow, so that there is work.

    A reading is not taken in every step: `learning.py` gives readings half a percent of the time.
    """
    spent: dict[str, list[float]] = {}
    job = Job(folder, PLAN, slow_sizes=[(LLM, 300, 2.0)])
    for name in ("prepare", "observe", "read_gate", "state"):
        _watch(job.learner, name, spent.setdefault(name, []))
    for _ in range(NUM_STEPS):
        job.run(1)
        job.learner.state()
    found = {name: statistics.median(seconds[FIRST_COUNTED:]) for name, seconds in spent.items()}
    batch, factors = SHAPES[:BATCH_SIZE], job.learner.factors
    for name, cost in (("plan", COST), ("corrected plan", COST.with_corrections(factors.by_module()))):
        found[name] = statistics.median(
            _processor_s(lambda of=cost: schedule_step(run_id="", step=0, plan=PLAN, batch=batch, cost=of))
            for _ in range(3)
        )
    return found


def _watch(of: object, name: str, spent: list[float]) -> None:
    """Time every call of a method."""
    method = getattr(of, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - begin_s)

    setattr(of, name, timed)


def _processor_s(work: Callable[[], object]) -> float:
    begin_s = time.thread_time()
    work()
    return time.thread_time() - begin_s


def _figures(run: RunDir) -> dict[str, Any]:
    seen = observations(run)
    readings = [r for r in read_spool(run.config().store, GateReading) if r.step >= FIRST_COUNTED]
    return {
        "median_step_s": statistics.median(step_s(seen, step) for step in range(FIRST_COUNTED, REAL_STEPS)),
        # Of the processor time of the slowest rank, too: the clock on the wall flatters where others use the machine.
        "median_slowest_s": statistics.median(slowest_s(seen, step) for step in range(FIRST_COUNTED, REAL_STEPS)),
        "learning_frac": statistics.median([r.cost_frac for r in readings] or [math.nan]),
        "learning_s": statistics.median([r.cost_frac * step_s(seen, r.step) for r in readings] or [math.nan]),
        "num_readings": len(readings),
        "num_ranks": NUM_RANKS,
    }


if __name__ == "__main__":
    *given, to = sys.argv[1:]
    Path(to).write_text(json.dumps(run([int(seed) for seed in given])))
