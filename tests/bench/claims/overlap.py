"""Is scheduling hidden behind training? Waits of a real training, and the scheduler's time beside large steps."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dflop.jobs.suite.contest import OURS
from tests.bench.claims.record import Claim, Expectation, Reading
from tests.bench.claims.tasks import Found, Say, Task
from tests.bench.claims.throughput import contests, places
from tests.bench.claims.throughput import tasks as throughput_tasks
from tests.bench.schedule.overhead import BOUND_FRAC, Waits, train

NUM_STEPS, QUICK_STEPS, QUICK_SEEDS = 60, 30, 1
BEHIND = 1.0
"""A schedule that takes as long as a step is just hidden behind it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training of two ranks and its scheduler on this machine."""

    seed: int
    ranks: tuple[Waits, ...]
    policies: dict[str, int]
    """Steps by what made their plan."""
    events: dict[str, int]
    """What the run did otherwise than planned."""


def measure(seeds: Sequence[int], full: bool, say: Say) -> list[Job]:
    """Trains, one job after the other; nothing else should run meanwhile."""
    found = []
    for seed in seeds if full else seeds[:QUICK_SEEDS]:
        num_steps = NUM_STEPS if full else QUICK_STEPS
        say(f"training {num_steps} steps with two processes and a scheduler, seed {seed}")
        found.append(run_job(seed, num_steps))
    return found


def run_job(seed: int, num_steps: int) -> Job:
    """One training, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, policies, events = train(seed, Path(folder), num_steps)
    return Job(seed, tuple(ranks), dict(policies), dict(events))


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    return throughput_tasks(seeds, full)


def claim(found: Found, seeds: Sequence[int], full: bool, jobs: Sequence[Job]) -> Claim:
    """With `jobs` as `measure` has them."""
    waits = Reading("wait for the next step, worst rank", _worst(jobs, "data_wait_frac"), "%", "measured")
    behind = Reading("wait for a plan, behind the step before", _worst(jobs, "schedule_wait_frac"), "%", "measured")
    outcomes = contests(found, places(seeds, full))
    by_seed = {s: [o for o in outcomes if o.where.seed == s] for s in seeds}
    share = Reading(
        "making a plan / the step it is for, worst setting on 64 GPUs",
        tuple(max(max(o.scheduling_cpu_s) / min(o.step_s[OURS]) for o in of) for of in by_seed.values() if of),
        "%", "measured over simulated",
    )  # fmt: skip
    first_s = [w.first_wait_s for job in jobs for w in job.ranks]
    events: Counter[str] = sum((Counter(job.events) for job in jobs), Counter())
    return Claim(
        "overlap",
        "Scheduling is fully overlapped with training.",
        "A real training of a tiny model, two processes and the scheduler sharing this machine's cores: share of step "
        "time that ranks' main threads wait for their next step, data and plan alike. And seconds of one core for a "
        "plan of 512 samples under 64-GPU plans, against the simulated step.",
        "fully overlapped",
        (waits, behind, share),
        (
            Expectation(waits, "<=", BOUND_FRAC, wait_reason(jobs)),
            Expectation(share, "<=", BEHIND, "a plan takes longer to make than its step lasts"),
        ),
        (
            f"the first step of a job has nothing to hide behind: {min(first_s):.2f} to {max(first_s):.2f} s"
            if first_s
            else "no training was run",
            f"what runs did otherwise than planned: {', '.join(f'{k} {n}' for k, n in events.items()) or 'nothing'}",
        ),
        tuple({"policies": job.policies, "events": job.events, **asdict(w)} for job in jobs for w in job.ranks),
    )


def wait_reason(jobs: Sequence[Job]) -> str:
    """Whether the plan was late or the data."""
    ranks = [w for job in jobs for w in job.ranks]
    if not ranks:
        return "no training was run"
    worst = max(ranks, key=lambda w: w.data_wait_frac)
    step_s = worst.step_s / worst.num_steps
    if worst.schedule_wait_frac < worst.data_wait_frac / 2:
        return (
            f"steps of {step_s:.2f} s, of which the feed waits {worst.schedule_wait_frac:.2%} for plans: what is late "
            "is decoding, which shares the cores with the ranks"
        )
    return f"steps of {step_s:.2f} s are too short for the scheduler, which shares the cores with the ranks"


def _worst(jobs: Sequence[Job], field: str) -> tuple[float, ...]:
    return tuple(max(getattr(w, field) for w in job.ranks) for job in jobs)
