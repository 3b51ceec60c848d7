"""What was submitted, by submitit's own files: a job's pickle says what it does, its name and its age which job it is.

The pickle gets its name once the backend has taken the job. A driver that dies behind that, even before it could note
anything, leaves a job that the next one finds here; one that dies before that leaves a job that finds no work.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from dflop.launch.job import JobHandle, JobSpec, JobState, Launcher
from dflop.launch.journal import Journal
from dflop.launch.results import has_all_results

_SUFFIX = "_submitted.pkl"


def handle_of(path: Path) -> JobHandle:
    """The job whose pickle this is."""
    payload = pickle.loads(path.read_bytes()).function
    spec, job_id = payload.spec, path.name.removesuffix(_SUFFIX)
    at_s = os.lstat(path).st_mtime  # of a job that was submitted by hand the pickle is a link
    return JobHandle(payload.backend, job_id, spec.name, spec.key, path.parent, spec.resources.num_tasks, at_s)


def submitted_in(folders: Iterable[Path], known: Collection[tuple[str, float]]) -> Iterator[JobHandle]:
    """Jobs that were submitted from these folders, but for those of known id and time of submission; oldest first."""
    pickles = [path for folder in {*folders} for path in folder.absolute().glob(f"*{_SUFFIX}")]
    for at_s, path in sorted((os.lstat(path).st_mtime, path) for path in pickles):
        if (path.name.removesuffix(_SUFFIX), at_s) not in known:
            # Cut off by a full disk, of another version, gone meanwhile: nobody's.
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
                yield handle_of(path)


def adopt_or_submit_all(
    launcher: Launcher, specs: Sequence[JobSpec], journal: Journal, *, keep_done: bool = False
) -> list[JobHandle]:
    """Handles of jobs: what lives is adopted, whoever submitted it, or done and unseen; the rest is submitted together.

    Args:
        launcher: Where to submit.
        specs: The jobs; their keys differ.
        journal: Of the run.
        keep_done: Whether a job that is known to have ended well is as good as a new one. Not for work that goes on
            under the same key.

    Raises:
        LaunchError: a submission was refused.
        ControllerAway: nobody answered.
    """
    handles: dict[str, JobHandle] = {}
    keys = {spec.key for spec in specs if journal.live(spec.key) is None}
    unnoted = [h for h in submitted_in({s.folder for s in specs}, journal.known()) if h.key in keys] if keys else []
    live = [*unnoted, *(handle for spec in specs if (handle := journal.live(spec.key)) is not None)]
    live = [handle for handle in live if handle.backend == launcher.backend]
    ended = []
    for handle, status in zip(live, launcher.poll_all(live) if live else [], strict=True):
        if not status.state.is_final or status.state is JobState.DONE:
            handles[handle.key] = handle
        elif handle not in unnoted:
            ended.append((handle, status))
    journal.submitted(*(handle for handle in unnoted if handle in handles.values()))
    journal.changes(ended)
    for spec in specs:
        before = journal.ended(spec.key) if keep_done and spec.key not in handles else None
        if before is not None and before[1] is JobState.DONE and has_all_results(before[0]):
            handles[spec.key] = before[0]
    missing = [spec for spec in specs if spec.key not in handles]
    submitted = launcher.submit_all(missing) if missing else []
    journal.submitted(*submitted)
    handles |= {handle.key: handle for handle in submitted}
    return [handles[spec.key] for spec in specs]
