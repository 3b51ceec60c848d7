"""A step becomes a submitit job, and what became of it: on Slurm or on this machine.

    JobSpecs --alike?--> Executor --> job.sbatch --sbatch--> squeue, sacct, exit files --Watcher--> JobStatus
                                       +--srun--> task: entry(*args) --> result, traceback, stops --explain--^

A job is a function named by reference plus string arguments, known by its id *and* its time of submission, because ids
come again. Shards of a data profile are an array; so are modules of a model profile, one array per tensor-parallel
degree. Elements that were done are kept when a sibling fails.

The one error of a job: inside it the ranks agree on a first cause (`Judge.verdict` in `dflop/train/liveness.py`), each
task leaves its result or traceback, and `results.py` ranks them.
"""

from __future__ import annotations

from dflop.launch.job import JobHandle, JobSpec, JobState, JobStatus, Launcher, LogPaths, Resources, log_paths
from dflop.launch.journal import Change, Journal, Noted
from dflop.launch.wait import adopt_or_submit_all, cancel_jobs, run_jobs_async, standing

__all__ = [
    "Change", "JobHandle", "JobSpec", "JobState", "JobStatus", "Journal", "Launcher", "LogPaths", "Noted", "Resources",
    "adopt_or_submit_all", "cancel_jobs", "log_paths", "run_jobs_async", "standing",
]  # fmt: skip
