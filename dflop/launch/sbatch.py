"""Hands batch scripts to sbatch: one call for an array, as many as it takes for more elements than the site lets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from dflop.errors import LaunchError
from dflop.launch.commands import last_line, run_command, submit_environment
from dflop.launch.job import JobHandle, JobSpec, make_folder, write_json
from dflop.launch.script import Batch, batches, options, render
from dflop.launch.site import Site

USUAL_MAX_ARRAY_SIZE = 1001
_QUEUE_FORMAT = "%i|%V|%o"
"""Id, time of submission, batch script."""
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
    # Before sbatch has it: whoever dies behind that leaves jobs, and here stands which.
    write_json(_elements_of(batch.script), [json.loads(handle.to_json()) for handle in batch.handles("", time.time())])
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


def strays(specs: Sequence[JobSpec], known: Collection[str]) -> list[JobHandle]:
    """Jobs in the queue that were submitted for these specs and that nobody has noted, oldest first.

    What has ended meanwhile is not found, and done again. Slurm is asked only where something was submitted before.

    Args:
        specs: The jobs.
        known: Ids of the jobs that were noted.

    Raises:
        LaunchError: squeue does not answer.
    """
    keys, folders = {spec.key for spec in specs}, {spec.folder.absolute() for spec in specs}
    submitted = {str(script): script for folder in folders for script in sorted(folder.glob("job*.sbatch"))}
    if not submitted:
        return []
    done = run_command(["squeue", "-h", "-r", "--me", "-o", _QUEUE_FORMAT])
    if done.returncode != 0:
        raise LaunchError(
            f"cannot tell whether job `{specs[0].name}` was submitted before: {last_line(done.stderr)}",
            where=next(iter(submitted)),
            hint="start again when squeue answers",
        )
    found = []
    for line in done.stdout.splitlines():
        job_id, _, rest = line.strip().partition("|")
        submitted_s, _, command = rest.partition("|")
        if job_id in known or command not in submitted:
            continue
        handle = _handle_of(submitted[command], job_id, float(submitted_s))
        if handle is not None and handle.key in keys:
            found.append(handle)
    return sorted(found, key=lambda handle: handle.submitted_at_s)


def _handle_of(script: Path, job_id: str, at_s: float) -> JobHandle | None:
    """The job of this id, an element of an array or alone; None where nothing says what its script does."""
    _, _, element = job_id.partition("_")
    try:
        elements = [JobHandle.from_json(json.dumps(e)) for e in json.loads(_elements_of(script).read_text())]
        return dataclasses.replace(elements[int(element or 0)], job_id=job_id, submitted_at_s=at_s)
    except (OSError, ValueError, IndexError):
        return None


def _elements_of(script: Path) -> Path:
    """Beside a batch script: the jobs that it runs, without their id."""
    return script.with_suffix(".json")
