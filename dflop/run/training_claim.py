"""Which job trains a run: one at a time, whoever started it.

Rank 0 holds the claim of its run (`<run>/claims/train`) until all ranks have written what they had to. On one machine a
file lock decides, which the kernel releases whatever ends its holder. On another node, a job that wants to train
watches the claim: a heartbeat means that its holder lives, and this job ends; `LEASE_S` without one, by the watcher's
own clock, or an end that Slurm knows of, mean that it is dead. Times of two machines are never compared. A holder that
was only suspended finds the newer claim before it writes its next checkpoint, and ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from dflop.errors import LaunchError, StoreError
from dflop.launch.commands import run_command
from dflop.launch.job import JobState
from dflop.launch.watcher import STATES
from dflop.run.directory import RunDir
from dflop.run.driver_lock import LEASE_S, locked
from dflop.run.messages import Say
from dflop.store import durable
from dflop.store.lease import Claim, Lease, falls_silent, is_alive, newest_claim

LOCK, POLL_S = "lock", 5.0


def trainer_of(run: RunDir, mode: str) -> Claim | None:
    """Who holds the run now, as far as can be seen without waiting; None: nobody."""
    folder = _folder(run, mode)
    claim = newest_claim(folder)
    if claim is None or not is_alive(claim, folder / LOCK, LEASE_S):
        return None
    return claim if claim.is_of_this_machine or not _has_ended(claim.job) else None


def num_attempts(run: RunDir, mode: str) -> int:
    """How often jobs have begun to train or to compare a run."""
    return max(durable.numbered(_folder(run, mode), ".json"), default=0)


class TrainingClaim:
    """A run that this job trains (`train`) or compares (`compare`), until it is released.

    Raises:
        LaunchError: another job does.
    """

    def __init__(self, run: RunDir, mode: str, say: Say) -> None:
        self._run, self._mode = run, mode
        folder, job = _folder(run, mode), _this_job()
        folder.mkdir(parents=True, exist_ok=True)
        self._held = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(folder / LOCK, lambda: self._refusal(newest_claim(folder))))
            dead = self._dead_epoch(folder, job, say)
            try:
                self._lease = stack.enter_context(_Lease(folder, job, dead))
            except StoreError:  # another job was faster
                raise self._refusal(newest_claim(folder)) from None
            self._held = stack.pop_all()

    @property
    def attempt(self) -> int:
        """Number of this start of the job, from 1; two starts never have the same one."""
        return self._lease.epoch

    def check(self) -> None:
        """Call it before a checkpoint is written.

        Raises:
            LaunchError: another job trains the run now, because this one gave no sign of life for too long.
        """
        try:
            self._lease.check()
        except StoreError:
            raise self._refusal(newest_claim(_folder(self._run, self._mode))) from None

    def release(self) -> None:
        """Let another job train the run."""
        with contextlib.suppress(OSError):  # a full disk: the lock is released, and Slurm knows that the job has ended
            self._held.close()

    def _dead_epoch(self, folder: Path, job: str, say: Say) -> int:
        """Number of the newest claim, once nobody holds it; 0 where there is none."""
        epoch, claim = num_attempts(self._run, self._mode), newest_claim(folder)
        # Of this machine: the file lock is ours. Of this job: its start before this one.
        if claim is None or claim.is_released or claim.is_of_this_machine or job == claim.job != "":
            return epoch
        if _has_ended(claim.job):
            return epoch
        say(f"run {self._run.run_id} was trained by {claim}; waiting for a heartbeat")
        dead_at_s = time.monotonic() + LEASE_S
        if falls_silent(folder, claim, lambda now: now.is_released or time.monotonic() >= dead_at_s, time.sleep):
            return epoch
        raise self._refusal(claim)

    def _refusal(self, holder: Claim | None) -> LaunchError:
        return LaunchError(
            f"run `{self._run.run_id}` is being trained by {holder or 'another job'}; this job ends, checkpoints stay",
            where=str(self._run.path),
            hint="`dflop train` follows the job that trains; to train in this one, cancel that one first",
        )


class _Lease(Lease):
    """A lease that takes over from claims up to a number, which are known to be dead, and from no other."""

    def __init__(self, folder: Path, job: str, dead_epoch: int) -> None:
        self._dead_epoch = dead_epoch
        super().__init__(folder.parent, lease_s=LEASE_S, timeout_s=0.0, name=folder.name, job=job)

    def _is_free(self, epoch: int) -> bool:
        return epoch <= self._dead_epoch


def _folder(run: RunDir, mode: str) -> Path:
    return run.path / "claims" / mode


def _this_job() -> str:
    """`slurm CLUSTER 12`, `local 3f2a`, or empty for processes that no launcher started."""
    env = os.environ
    if job_id := env.get("SLURM_JOB_ID"):
        return " ".join(["slurm", *filter(None, [env.get("SLURM_CLUSTER_NAME")]), job_id])
    return f"local {job_id}" if (job_id := env.get("SUBMITIT_LOCAL_JOB_ID")) else ""


def _has_ended(job: str) -> bool:
    """Whether Slurm says so of a job of its own; where it cannot be asked, no."""
    kind, *cluster, number = job.split() or [""] * 2
    here = os.environ.get("SLURM_CLUSTER_NAME")
    if kind != "slurm" or (here and cluster and here != cluster[0]):
        return False
    done = run_command(["squeue", "-h", "-t", "all", "-o", "%T", "-j", number])
    states = [STATES.get(word, JobState.RUNNING) for word in done.stdout.split()]
    return "Invalid job id" in done.stderr or (bool(states) and all(state.is_final for state in states))
