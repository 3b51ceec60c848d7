"""Sizes that are really slow: `python -m tests.bench.correct --part real`. Everything is measured on this machine.

A tiny Omni model is profiled as in any run, then trained by two replicas, a core each, in which samples of some lengths
take four times their time in the LLM: it multiplies matrices for the rest of it. Two jobs train the same batches, one
with corrections off, one with the gate on `auto`, as users run them; the store is asked meanwhile what has been learnt.
Then the StepPlans that both made, and those of an oracle whose costs are multiplied by what is really slow from the
first step on, of the last quarter of the steps, are trained step by step in turn in one more job: the step times that
are compared. A step has eight microbatches, all ranks together: learning a dozen factors takes some dozens of steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflop.cost.model import CostModel
from dflop.errors import StoreError
from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import GlobalBatches
from dflop.jobs.talk import say
from dflop.records import LLM, GateReading, ModuleFactors, SampleShape, StepPlan
from dflop.schedule.scheduler import schedule_step
from dflop.store import console
from dflop.store.ingest import ingest
from dflop.store.spool import read_spool
from tests.bench.correct import real_runs, replayed
from tests.bench.correct.real_runs import Found, observations, slowest_s, step_s
from tests.jobs.training import fresh, set_config

MODULE, SHARES, FACTOR = LLM, (0.5, 0.75), 4.0
"""Samples of the sizes that hold these shares of the predicted seconds of the LLM take so many times as long."""
NUM_STEPS, NUM_STEPS_OF_ONE_SEED, NUM_WARM_UP_STEPS = 160, 40, 4
"""With one seed, which is to see that it works, there are fewer steps, too."""
NUM_COUNTED_OF = 4
"""Of the steps, one in so many is counted: the last ones, when learning is to be over."""
OFF, AUTO, ORACLE = "off", "auto", "oracle"
ARMS = (OFF, AUTO, ORACLE)


def main(sizes: Path | None, seeds: Sequence[int]) -> Found:
    """Every seed orders the same samples otherwise; real sizes of other samples have no media to train on."""
    return real_runs.in_a_process_of_its_own(__name__, seeds)


def run(seeds: Sequence[int]) -> dict[str, Any]:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        num_steps = NUM_STEPS if len(seeds) > 1 else NUM_STEPS_OF_ONE_SEED
        profiled = real_runs.profiled_run(Path(folder), is_seen, f"train.num_steps={num_steps}")
        bounds = real_runs.seconds_range(profiled, MODULE, *SHARES)
        say(f"`{MODULE}` items of {bounds[0]} to {bounds[1] - 1} tokens take x{FACTOR:g}")
        return {
            "slow": {"module": MODULE, "tokens": bounds, "shares": SHARES, "factor": FACTOR},
            "num_steps": num_steps,
            "first_counted_step": first_counted(num_steps),
            "seeds": [_of_seed(profiled, Path(folder) / f"seed-{seed}", seed, bounds) for seed in seeds],
        }


def _of_seed(profiled: RunDir, folder: Path, seed: int, bounds: tuple[int, int]) -> dict[str, Any]:
    slowness = f"shapes:{MODULE}:{bounds[0]}:{bounds[1]}:{FACTOR:g}"
    runs = {
        OFF: configured(profiled, folder / OFF, f"train.seed={seed}", "correct.enabled=false"),
        AUTO: configured(profiled, folder / AUTO, f"train.seed={seed}", "correct.gate=auto"),
    }
    watch = Watch(runs[AUTO])
    real_runs.train(runs[OFF], "tests.jobs.slowed", str(runs[OFF].path), slowness)
    real_runs.train(runs[AUTO], "tests.jobs.slowed", str(runs[AUTO].path), slowness, watch=watch)
    plans = {arm: _plans_of(of) for arm, of in runs.items()} | {ORACLE: _oracle(runs[OFF], bounds)}
    found = {
        "seed": seed,
        "jobs_step_s": {arm: _median_step_s(of) for arm, of in runs.items()},
        "gate_first_on": next((r.step for r in _readings(runs[AUTO]) if r.is_on), None),
        "watched": watch.figures(),
        **_replay(
            configured(profiled, folder / "replay", f"train.seed={seed}"),
            {arm: dict(sorted(of.items())[first_counted(len(of)) :]) for arm, of in plans.items()},
            slowness,
        ),
    }
    _tell(found)
    return found


@dataclass
class Watch:
    """Asks the store of a run that is under way what has been learnt, as a person would."""

    run: RunDir
    delays_s: dict[float, float] = field(default_factory=dict)
    """By the time a correction was made: until SQL saw it."""

    def __call__(self) -> None:
        store = self.run.config().store
        ingest(store)
        try:
            _, rows = console.query(store, "select distinct observed_at_s from correction")
        except StoreError:
            return
        for (observed_at_s,) in rows:
            self.delays_s.setdefault(observed_at_s, time.time() - observed_at_s)

    def figures(self) -> dict[str, Any]:
        """How long rows take to be seen where they are ingested about once a second."""
        sql = "select module, min_tokens, max_tokens, factor, is_in_force, level from v_correction_latest order by all"
        ingest(self.run.config().store)
        delays = list(self.delays_s.values())
        return {
            "num_seen_while_running": len(delays),
            "delay_s": {"median": statistics.median(delays), "max": max(delays)} if delays else None,
            "learnt": [list(row) for row in console.query(self.run.config().store, sql)[1]],
        }


def is_seen(shape: SampleShape) -> bool:
    """Whether the encoder of pictures and clips, or none, has work with a sample."""
    return all(item.module == "vision" for item in shape.items)


def configured(profiled: RunDir, folder: Path, *overrides: str) -> RunDir:
    """A copy of a profiled run in a folder of its own, with other settings."""
    run = fresh(profiled, folder)
    set_config(run, *overrides)
    return run


def _plans_of(run: RunDir) -> dict[int, StepPlan]:
    return {plan.step: plan for plan in read_spool(run.config().store, StepPlan)}


def _readings(run: RunDir) -> list[GateReading]:
    return sorted(read_spool(run.config().store, GateReading), key=lambda r: r.step)


def _oracle(run: RunDir, bounds: tuple[int, int]) -> dict[int, StepPlan]:
    """Plans of who knows what is slow, though not how far the profile is off elsewhere."""
    batches, config = GlobalBatches(run.config(), run.shapes()), run.config()
    cost = CostModel(run.cost_tables(), {MODULE: ModuleFactors(MODULE, 1.0, bounds, (1.0, FACTOR, 1.0))})
    return {
        step: schedule_step(run_id=run.run_id, step=step, plan=run.plan(), batch=batches.at(step), cost=cost)
        for step in range(config.train.num_steps)
    }


def first_counted(num_steps: int) -> int:
    """First step that is compared."""
    return num_steps - num_steps // NUM_COUNTED_OF


def _median_step_s(run: RunDir) -> float:
    seen, first = observations(run), first_counted(run.config().train.num_steps)
    return statistics.median(step_s(seen, step) for step, rank in seen if rank == 0 and step >= first)


def _replay(run: RunDir, plans: Mapping[str, Mapping[int, StepPlan]], slowness: str) -> dict[str, Any]:
    """Step times of all arms, a global batch at a time, no arm always first."""
    steps = sorted(plans[OFF])
    order = [(steps[0], ARMS[0])] * NUM_WARM_UP_STEPS
    order += [(step, ARMS[(step + turn) % len(ARMS)]) for step in steps for turn in range(len(ARMS))]
    replayed.give_steps(run, [replace(plans[arm][step], policy=arm) for step, arm in order])
    real_runs.train(run, "tests.bench.correct.replayed", str(run.path), slowness)
    seen = observations(run)
    measured = {pair: number for number, pair in enumerate(order) if number >= NUM_WARM_UP_STEPS}
    wall, cpu = (
        {arm: [seconds(seen, measured[step, arm]) for step in steps] for arm in ARMS} for seconds in (step_s, slowest_s)
    )
    return {
        "num_plans_unlike_off": {
            arm: sum(plans[arm][s].work != plans[OFF][s].work for s in steps) for arm in (AUTO, ORACLE)
        },
        "wall": compared(wall),
        "cpu_of_slowest_rank": compared(cpu),
    }


def compared(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Step times of the arms on the same batches."""
    ratios = {arm: [a / b for a, b in zip(seconds[OFF], seconds[arm], strict=True)] for arm in (AUTO, ORACLE)}
    sums = {arm: sum(seconds[arm]) for arm in ARMS}
    return {
        "step_s": {arm: sums[arm] / len(seconds[arm]) for arm in ARMS},
        "off_over": {
            arm: {"mean": statistics.mean(r), "sd": statistics.stdev(r), "median": statistics.median(r)}
            for arm, r in ratios.items()
        },
        "recovered_frac": (sums[OFF] - sums[AUTO]) / (sums[OFF] - sums[ORACLE]),
    }


def _tell(found: Mapping[str, Any]) -> None:
    print(
        f"seed {found['seed']}: gate on from step {found['gate_first_on']}, seen by SQL {found['watched']['delay_s']}"
    )
    for clock in ("wall", "cpu_of_slowest_rank"):
        c = found[clock]
        ratios = ", ".join(f"off / {arm} {r['mean']:.3f} ±{r['sd']:.3f}" for arm, r in c["off_over"].items())
        steps = ", ".join(f"{arm} {s:.3f} s" for arm, s in c["step_s"].items())
        print(f"  {clock:20s} {ratios}; recovered {c['recovered_frac']:.0%}   ({steps})", flush=True)


if __name__ == "__main__":
    Path(sys.argv[-1]).write_text(json.dumps(run([int(seed) for seed in sys.argv[1:-1]])))
