"""What submitting and watching many jobs costs: `python -m tests.bench.launch [--real] [--num-jobs N] [--json FILE]`.

CPU seconds of this process and of the Slurm clients it calls, compared with the obvious other way: a batch job each,
and a waiter each. With --real jobs run on the Slurm of this machine (tests/slurm/cluster.sh up). Without it the clients
are those of the tests' fake Slurm, which starts all jobs at once, so they are few and bounds say little. Ends with 1
when a state is lost.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from dflop.launch import JobSpec, JobState, Journal, Resources, Site, run_jobs_async, wait
from dflop.launch.journal import Change
from dflop.launch.slurm import SlurmLauncher
from tests.bench.command import options
from tests.bench.figures import ROOT, Figure, conclude, line
from tests.launch import fake_slurm

NUM_REAL, NUM_FAKE, NUM_SINGLE = 500, 20, 50
"""Jobs; and how many at most are submitted one by one, from which the figure for all is extrapolated."""
SUBMIT_BOUND_S, WATCH_BOUND_S = 1.0, 2.0
"""For 500 jobs; of watching, for as many polls as a minute and a half has."""


@dataclass(frozen=True)
class Cost:
    """Of one piece of work."""

    cpu_s: float
    wall_s: float
    commands: Counter[str]

    def __str__(self) -> str:
        calls = ", ".join(f"{number} {name}" for name, number in sorted(self.commands.items()))
        return f"{self.wall_s:.1f} s wall; {calls or 'no command'}"


@contextmanager
def counted() -> Iterator[list[Cost]]:
    """Cost of the block, when it has ended."""
    found: list[Cost] = []
    commands: Counter[str] = Counter()
    run = subprocess.run

    def counting(args, *rest, **options):
        commands[args[0]] += 1
        return run(args, *rest, **options)

    subprocess.run = counting
    before, began = cpu_s(), time.monotonic()
    try:
        yield found
    finally:
        subprocess.run = run
        found.append(Cost(cpu_s() - before, time.monotonic() - began, commands))


def cpu_s() -> float:
    """Of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def specs(folder: Path, name: str, num_jobs: int, *, array: bool = True, hold: bool = False) -> list[JobSpec]:
    resources = Resources(time_limit_min=10, extra={"hold": ""} if hold else {})
    return [
        JobSpec(
            name=f"{name}-{number}", entry="tests.launch.entries:report", args=(str(number),), key=f"{name}/{number}",
            folder=folder / name if array else folder / f"{name}-{number}", resources=resources,
            env={"PYTHONPATH": str(ROOT)}, array=name if array else "",
        )
        for number in range(num_jobs)
    ]  # fmt: skip


def make_launcher(max_jobs_at_once: int) -> SlurmLauncher:
    return SlurmLauncher(run_id="bench", site=Site(max_jobs_at_once=max_jobs_at_once), poll_interval_s=2.0)


def submitting(folder: Path, num_jobs: int) -> Figure:
    launcher = make_launcher(16)
    with counted() as cost:
        handles = launcher.submit_all(specs(folder, "held", num_jobs, hold=True))
    launcher.cancel(*handles)
    num_single = min(NUM_SINGLE, num_jobs)
    with counted() as single:
        alone = [launcher.submit(spec) for spec in specs(folder, "single", num_single, array=False, hold=True)]
    launcher.cancel(*alone)
    return Figure(
        f"submit {num_jobs} jobs, CPU", cost[0].cpu_s, SUBMIT_BOUND_S, "a batch job each (extrapolated)",
        single[0].cpu_s * num_jobs / num_single, note=str(cost[0]),
    )  # fmt: skip


def watching(folder: Path, num_jobs: int) -> tuple[Figure, int]:
    """The figure, and how many jobs ended in a state that they did not have."""
    ends: Counter[JobState] = Counter()

    def note(changes: Sequence[Change]) -> None:
        ends.update(status.state for _, status in changes if status.state.is_final)

    launcher, journal = make_launcher(16), Journal(folder / "together", "bench")
    submitted = specs(folder, "together", num_jobs)
    with counted() as cost:
        values = asyncio.run(run_jobs_async(launcher, submitted, journal, on_changes=note, poll_interval_s=1.0))
    num_lost = num_jobs - ends[JobState.DONE] + sum(len(v) != 1 for v in values)

    async def one_each() -> None:
        launcher, journal = make_launcher(16), Journal(folder / "each", "bench")
        handles = launcher.submit_all(specs(folder, "each", num_jobs))
        journal.submitted(*handles)
        await asyncio.gather(*(wait(launcher, h, on_state=journal.changed, poll_interval_s=1.0) for h in handles))

    with counted() as each:
        asyncio.run(one_each())
    figure = Figure(
        f"watch {num_jobs} jobs to their ends, CPU", cost[0].cpu_s, WATCH_BOUND_S, "a waiter each", each[0].cpu_s,
        note=f"{cost[0]}; {ends[JobState.DONE]} done, {num_lost} lost",
    )  # fmt: skip
    return figure, num_lost


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--real", action="store_true", help="on the Slurm of this machine")
    parser.add_argument("--num-jobs", type=int, help=f"default: {NUM_REAL}, without --real {NUM_FAKE}")
    args = parser.parse_args()
    num_jobs = args.num_jobs or (NUM_REAL if args.real else NUM_FAKE)
    # Not /tmp on a real cluster's login node: job folders must be where the nodes see them.
    where = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="dflop-bench-", dir=where, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if not args.real:
            (folder / "slurm").mkdir()
            os.environ["PATH"] = f"{fake_slurm.install(folder / 'slurm')}:{os.environ['PATH']}"
        submitted = submitting(folder, num_jobs)
        print(line(submitted), flush=True)
        watched, num_lost = watching(folder, num_jobs)
        print(line(watched), flush=True)
    bounds = [(submitted.name, submitted.is_met), (watched.name, watched.is_met), (f"{num_lost} lost", not num_lost)]
    found = {"is_real": args.real, "figures": [asdict(submitted), asdict(watched)]}
    conclude(found, bounds, args.json, "submitit")


if __name__ == "__main__":
    main()
