"""What scheduling costs the ranks that train: a job of two ranks and its scheduler, waits as a share of step time.

Measured on this machine's cores, which the scheduler shares with the ranks. `data_wait_s` is what a rank's main thread
waited for a prepared step; `schedule_wait_s` what its feed thread waited for a plan, behind the step before unless it
shows in `data_wait_s`. The first step of a job has nothing to hide behind and is told apart.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dflop.records import RunEvent, StepObservation
from dflop.store.spool import read_spool
from tests.bench.figures import conclude
from tests.jobs.training import ROOT, planned_run, run_to_the_end, start_ranks

NUM_STEPS = 60
MODEL = ROOT / "configs/models/tiny_omni.yaml"
BOUND_FRAC = 0.005
"""Of step time: what the main thread waits, for data and plan alike. What the feed thread waits is hidden, and told."""


@dataclass(frozen=True)
class Waits:
    """Waits of one rank over the steps of a job but the first."""

    seed: int
    rank: int
    module: str
    num_steps: int
    step_s: float
    """Sum over the steps, waits for their input included."""
    data_wait_frac: float
    schedule_wait_frac: float
    first_wait_s: float
    """For the first step's input."""


def waits(observations: Iterable[StepObservation], seed: int) -> list[Waits]:
    """Per rank, in rank order."""
    ranks: dict[int, list[StepObservation]] = {}
    for seen in sorted(observations, key=lambda o: o.step):
        ranks.setdefault(seen.rank, []).append(seen)
    found = []
    for rank, (first, *rest) in sorted(ranks.items()):
        step_s = sum(o.step_s + o.data_wait_s for o in rest)
        found.append(
            Waits(
                seed, rank, first.module, len(rest), step_s,
                sum(o.data_wait_s for o in rest) / step_s, sum(o.schedule_wait_s for o in rest) / step_s,
                first.data_wait_s,
            )
        )  # fmt: skip
    return found


def train(seed: int, folder: Path, num_steps: int = NUM_STEPS) -> tuple[list[Waits], dict[str, int], dict[str, int]]:
    """(waits by rank, steps by policy, events by kind) of a job."""
    run = planned_run(folder, f"model={MODEL}", f"train.num_steps={num_steps}", f"train.seed={seed}")
    ended = run_to_the_end(run, start_ranks(run, "dflop.jobs.train", str(run.path), "train"))
    if any(ended.codes):
        raise SystemExit("\n".join(ended.stderr))
    store = run.config().store
    seen = read_spool(store, StepObservation)
    policies = Counter(o.policy for o in seen if o.rank == 0)
    return waits(seen, seed), policies, Counter(e.kind for e in read_spool(store, RunEvent))


def line(w: Waits) -> str:
    """The waits of a rank on one line."""
    verdict = "ok" if w.data_wait_frac <= BOUND_FRAC else "MISSED"
    return (
        f"overhead  seed {w.seed}  rank {w.rank} {w.module:7s} {w.num_steps} steps of {w.step_s / w.num_steps:.3f} s"
        f"   data wait {w.data_wait_frac:.3%}   bound {BOUND_FRAC:.1%}   {verdict}"
        f"   behind steps, for plans {w.schedule_wait_frac:.3%}   first step {w.first_wait_s:.2f} s"
    )


def main(sizes: Path | None, seeds: Sequence[int], json_path: Path | None) -> None:
    """One job per seed; `sizes` is not used, for training needs media."""
    del sizes
    jobs, found = [], []
    for seed in seeds:
        print(f"overhead: training {NUM_STEPS} steps, seed {seed}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            ranks, policies, events = train(seed, Path(folder))
        jobs.append({"seed": seed, "policies": policies, "events": events})
        found += ranks
        for w in ranks:
            print(line(w))
        print(f"overhead  seed {seed}  plans {dict(policies)}  events {dict(events)}", flush=True)
    content = {"bound_frac": BOUND_FRAC, "jobs": jobs, "ranks": [asdict(w) for w in found]}
    bounds = [(f"data wait, seed {w.seed}, rank {w.rank}", w.data_wait_frac <= BOUND_FRAC) for w in found]
    conclude(content, bounds, json_path, "torch", "numpy", "numba")
