"""Which jobs are there already: alive, whoever submitted them, or done and worth keeping. The rest is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from dflop.launch.job import JobHandle, JobSpec, JobState, Launcher
from dflop.launch.journal import Journal
from dflop.launch.results import has_all_results


def adopt_or_submit(launcher: Launcher, spec: JobSpec, journal: Journal) -> JobHandle:
    """The live or unseen-ended job with the same key if there is one, else a new submission, noted in the journal.

    Raises:
        LaunchError: the submission was refused.
    """
    return adopt_or_submit_all(launcher, [spec], journal)[0]


def adopt_or_submit_all(
    launcher: Launcher, specs: Sequence[JobSpec], journal: Journal, *, keep_done: bool = False
) -> list[JobHandle]:
    """The same for several jobs: what lives is adopted, the rest is submitted together.

    Args:
        launcher: Where to submit.
        specs: The jobs; their keys differ.
        journal: Of the run.
        keep_done: Whether a job that is known to have ended well is as good as a new one. Not for work that goes on
            under the same key.

    Raises:
        LaunchError: a submission was refused, or nobody can say whether it was made before.
    """
    handles: dict[str, JobHandle] = {}
    _note_strays(launcher, specs, journal)
    live = [h for spec in specs if (h := journal.live(spec.key)) is not None and h.backend == launcher.backend]
    ended = []
    for handle, status in zip(live, launcher.poll_all(live) if live else [], strict=True):
        if not status.state.is_final or status.state is JobState.DONE:
            handles[handle.key] = handle
        else:
            ended.append((handle, status))
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


def _note_strays(launcher: Launcher, specs: Sequence[JobSpec], journal: Journal) -> None:
    """Note jobs of a driver that died after it had submitted them and before it could say so."""
    unseen = [spec for spec in specs if journal.live(spec.key) is None]
    if not unseen:
        return
    if strays := launcher.strays(unseen, {record.job_id for record in journal.records()}):
        journal.submitted(*strays)
