"""What submitting and watching 500 jobs costs on this machine's Slurm: `python -m tests.bench.launch [--json FILE]`.

CPU seconds of this process and of the Slurm clients it calls, compared with the obvious other way: a batch job each,
and a waiter each. `tests/slurm/cluster.sh up` starts a Slurm. Ends with 1 when a state is lost.
"""

import asyncio
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflop.config import SlurmConfig
from dflop.launch import JobSpec, JobState, Journal, Resources, run_jobs_async
from dflop.launch.journal import Change
from dflop.launch.slurm import SlurmLauncher
from tests.bench.command import options
from tests.bench.figures import ROOT, Figure, conclude, line

NUM_JOBS, NUM_SINGLE = 500, 50
"""Jobs; and how many at most are submitted one by one, from which the figure for all is extrapolated."""
SUBMIT_BOUND_S, WATCH_BOUND_S = 1.0, 2.0
"""Of watching, for as many polls as a minute and a half has."""


def cpu_s(work: Callable[[], object]) -> float:
    """Of this process and of the children that it waits for."""

    def used_s() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    before_s = used_s()
    work()
    return used_s() - before_s


def specs(
    folder: Path, name: str, num_jobs: int = NUM_JOBS, *, array: bool = True, hold: bool = False
) -> list[JobSpec]:
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
    return SlurmLauncher(run_id="bench", site=SlurmConfig(max_jobs_at_once=max_jobs_at_once, poll_interval_s=2.0))


def submitting(folder: Path) -> Figure:
    launcher, handles = make_launcher(16), []
    took_s = cpu_s(lambda: handles.extend(launcher.submit_all(specs(folder, "held", hold=True))))
    singles = specs(folder, "single", NUM_SINGLE, array=False, hold=True)
    single_s = cpu_s(lambda: handles.extend([launcher.submit(spec) for spec in singles]))
    launcher.cancel(*handles)
    other = "a batch job each (extrapolated)"
    return Figure(f"submit {NUM_JOBS} jobs, CPU", took_s, SUBMIT_BOUND_S, other, single_s * NUM_JOBS / NUM_SINGLE)


def watching(folder: Path) -> tuple[Figure, int]:
    """The figure, and how many jobs ended in a state that they did not have."""
    ends: Counter[JobState] = Counter()
    values: list[Any] = []

    def note(changes: Sequence[Change]) -> None:
        ends.update(status.state for _, status in changes if status.state.is_final)

    async def together() -> None:
        launcher, journal = make_launcher(16), Journal(folder / "together", "bench")
        submitted = specs(folder, "together")
        values.extend(await run_jobs_async(launcher, submitted, journal, on_changes=note, poll_interval_s=1.0))

    async def one_each() -> None:
        launcher, submitted = make_launcher(16), specs(folder, "each")
        journals = [Journal(folder / spec.name, "bench") for spec in submitted]  # a journal is one thread's
        for journal, handle in zip(journals, launcher.submit_all(submitted), strict=True):
            journal.submitted(handle)
        waiters = zip(submitted, journals, strict=True)
        await asyncio.gather(*(run_jobs_async(launcher, [s], j, poll_interval_s=1.0) for s, j in waiters))

    began_s = time.monotonic()
    took_s = cpu_s(lambda: asyncio.run(together()))
    wall_s = time.monotonic() - began_s
    each_s = cpu_s(lambda: asyncio.run(one_each()))
    num_lost = NUM_JOBS - ends[JobState.DONE] + sum(len(v) != 1 for v in values)
    note_of_ends = f"{ends[JobState.DONE]} done, {num_lost} lost, in {wall_s:.0f} s"
    name = f"watch {NUM_JOBS} jobs to their ends, CPU"
    return Figure(name, took_s, WATCH_BOUND_S, "a waiter each", each_s, note=note_of_ends), num_lost


def main() -> None:
    args = options(__doc__).parse_args()
    # Not /tmp on a real cluster's login node: job folders must be where the nodes see them.
    where = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="dflop-bench-", dir=where, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        submitted = submitting(folder)
        print(line(submitted), flush=True)
        watched, num_lost = watching(folder)
        print(line(watched), flush=True)
    bounds = [(submitted.name, submitted.is_met), (watched.name, watched.is_met), (f"{num_lost} lost", not num_lost)]
    conclude({"figures": [asdict(submitted), asdict(watched)]}, bounds, args.json, "submitit")


if __name__ == "__main__":
    main()
