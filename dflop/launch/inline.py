"""Runs a job in the calling process, at submission. For tests and for steps too small to be worth a process.

One task only: ranks of a distributed job cannot share a process. Output goes to the caller's own streams, so there
are no log files; the result is pickled like everyone else's, so handles and journals work the same.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dflop.errors import LaunchError
from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, OneByOne, make_folder
from dflop.launch.payload import load_entry
from dflop.launch.ranks import rank_environment
from dflop.launch.results import collect_values, has_all_results, result_path, status_from_results


class InlineLauncher(OneByOne):
    """Launcher whose jobs have ended by the time `submit` returns."""

    backend = "inline"

    def submit(self, spec: JobSpec) -> JobHandle:
        """Run the job now; an exception of the entry becomes the job's result, as it would elsewhere.

        Raises:
            LaunchError: the job wants more than one task.
        """
        if spec.resources.num_tasks != 1:
            raise LaunchError(
                f"job `{spec.name}` wants {spec.resources.num_tasks} tasks; the inline backend runs one",
                hint="use the local or slurm backend",
            )
        folder = make_folder(spec.folder)
        handle = JobHandle(self.backend, uuid.uuid4().hex[:12], spec.name, spec.key, folder, 1, time.time())
        one_rank = rank_environment(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            master_addr="127.0.0.1",
            master_port=0,
        )
        outcome: tuple[str, Any]
        with _environment({**spec.env, **one_rank}):
            try:
                outcome = ("success", load_entry(spec.entry)(*spec.args))
            except Exception:
                outcome = ("error", traceback.format_exc())
        result_path(handle, 0).write_bytes(pickle.dumps(outcome))
        return handle

    def strays(self, specs: Sequence[JobSpec], known: Collection[str]) -> list[JobHandle]:
        """None: jobs end with the process that submits them."""
        return []

    def poll(self, handle: JobHandle) -> JobStatus:
        """DONE or FAILED; LOST when the process died inside the job."""
        if not has_all_results(handle):
            return JobStatus(JobState.LOST, "its process died")
        return status_from_results(handle)

    def cancel(self, *handles: JobHandle) -> None:
        """Do nothing: the jobs have ended."""

    def interrupt(self, handle: JobHandle) -> None:
        """Do nothing: the job has ended."""

    def collect(self, handle: JobHandle) -> list[Any]:
        """Return value of the one task.

        Raises:
            LaunchError: the entry raised.
        """
        return collect_values(handle, self.poll(handle))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
