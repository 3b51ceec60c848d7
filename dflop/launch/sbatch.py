"""Hands batch scripts to sbatch: one call for an array, as many as it takes for more elements than the site lets."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence

from dflop.errors import LaunchError
from dflop.launch.commands import last_line, run_command, submit_environment
from dflop.launch.job import JobHandle, JobSpec, make_folder
from dflop.launch.script import Batch, batches, options, render
from dflop.launch.site import Site

USUAL_MAX_ARRAY_SIZE = 1001
SUBMIT_TIMEOUT_S = 600
"""sbatch itself tries again while the controller is busy; a job of one that was ended half-way would be nobody's."""


def max_array_size() -> int:
    """Elements that an array may have here; Slurm's default where it does not say."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_command(["scontrol", "show", "config"]).stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else USUAL_MAX_ARRAY_SIZE


def submit_all(specs: Sequence[JobSpec], site: Site, comment: str) -> list[JobHandle]:
    """Submit jobs, those of one array together.

    Where a limit of jobs at once is set and an array is too large for one call, each part waits for the one before.

    Raises:
        LaunchError: sbatch refused a job; those before it are cancelled.
    """
    largest = max_array_size() if len({s.array for s in specs if s.array}) < sum(s.array != "" for s in specs) else 1
    handles: dict[int, JobHandle] = {}
    job_ids: list[str] = []
    before: Batch | None = None
    for batch in batches(specs, largest):
        waits = site.max_jobs_at_once and before is not None and batch.is_array and before.name == batch.name
        try:
            job_id = submit(batch, site, comment, after=job_ids[-1] if waits else "")
        except LaunchError:
            if job_ids:
                run_command(["scancel", *job_ids])
            raise
        job_ids.append(job_id)
        handles |= zip(batch.positions, batch.handles(job_id, time.time()), strict=True)
        before = batch
    return [handles[position] for position in range(len(specs))]


def submit(batch: Batch, site: Site, comment: str, *, after: str = "") -> str:
    """Write the script, hand it to sbatch, and keep it under the job's id, too.

    Args:
        batch: What to submit.
        site: The Slurm's dialect.
        comment: By which a run's jobs can be found in the queue.
        after: Id of a job that has to end first.

    Returns:
        The id, of an array the array's.

    Raises:
        LaunchError: sbatch refused the job; the message is sbatch's own.
    """
    make_folder(batch.folder)
    batch.script.write_text(render(batch, site, comment))
    batch.script.chmod(0o700)
    command = ["sbatch", "--parsable", *([f"--dependency=afterany:{after}"] if after else []), str(batch.script)]
    done = run_command(
        command, submit_environment(os.environ, options(batch, site, comment)), timeout_s=SUBMIT_TIMEOUT_S
    )
    # With several clusters `123;name`; plugins of a site may talk before it.
    found = re.search(r"^(\d+)(;.*)?$", last_line(done.stdout))
    if done.returncode != 0 or found is None:
        why = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LaunchError(
            f"sbatch refused job `{batch.name}`: {why}",
            where=str(batch.script),
            hint="check partition, limits and extra options in the cluster file",
        )
    with contextlib.suppress(OSError):  # for people; not every file system has links
        os.link(batch.script, batch.folder / f"{found[1]}_{batch.script_name}")
    return found[1]
