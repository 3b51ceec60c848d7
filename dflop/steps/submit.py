"""What each step of a run submits: entry point, arguments, resources, and the key under which it is adopted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dflop.config import Config
from dflop.data.dataset_profile import BLOCK_ROWS
from dflop.errors import LaunchError
from dflop.launch import JobSpec, Resources
from dflop.learn.remeasure import read_doubts
from dflop.records import Plan
from dflop.run.directory import RunDir
from dflop.steps.planning import Gap

CPU_ENV = {
    # Keeps large tensors on the heap between steps: returning them to the kernel means page faults on every reuse,
    # which cost up to half of a CPU step and make timings meaningless.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    # Huge pages under the heap: with small ones a layer slows down as the heap grows, by up to a fifth, and what two
    # layers cost says less about eight.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_JOBS = "dflop.jobs.model_profile"


def data_jobs(
    run: RunDir, config: Config, profile_key: str, backend: str, first_row: int = 0, num_new_rows: int = 0
) -> list[JobSpec]:
    """One job per shard of the dataset, all of one array; on this machine no more than it has cores.

    Of a dataset that has grown, the rows from `first_row` on are shared out: no job for less than a block.
    """
    num_shards, num_workers = config.data_profile.num_shards, config.data_profile.num_workers
    if backend == "local":
        num_shards = min(num_shards, len(os.sched_getaffinity(0)))
    known: tuple[str, ...] = ()
    key = f"{run.run_id}/data/{profile_key}"
    if first_row:
        num_shards = min(num_shards, -(-num_new_rows // BLOCK_ROWS))
        known, key = (str(first_row),), f"{key}/from-{first_row}"
    return [
        _job(
            run, config, f"data-{shard}", "dflop.jobs.data_profile:main",
            (profile_key, str(shard), str(num_shards), *known), f"{key}/{shard}-of-{num_shards}",
            num_tasks=1, cpus_per_task=num_workers, array="data",
        )
        for shard in range(num_shards)
    ]  # fmt: skip


def in_turns(config: Config, jobs: Sequence[JobSpec]) -> list[Sequence[JobSpec]]:
    """Groups of jobs that time something: on Slurm one, as each job has its own devices; on one machine each alone."""
    return [jobs] if config.cluster.backend == "slurm" else [[job] for job in jobs]


def model_jobs(run: RunDir, config: Config, profile_key: str, hardware: str, modules: Sequence[str]) -> list[JobSpec]:
    """Jobs that time the modules that the data uses, and one for messages between processes where there are several.

    On Slurm per tensor-parallel degree an array with one per module; on one machine a job per degree times all modules,
    one after the other.
    """
    are_apart = config.cluster.backend == "slurm" and len(modules) > 1
    jobs = [
        _job(
            run, config, "-".join((f"profile-tp{tp}", *only)), f"{_JOBS}:main", (profile_key, hardware, str(tp), *only),
            "/".join((run.run_id, "profile", profile_key, f"tp{tp}", *only)), num_tasks=tp,
            array=f"profile-tp{tp}" if are_apart else "",
        )
        for tp in config.model_profile.tp
        for only in ([(module,) for module in modules] if are_apart else [()])
    ]  # fmt: skip
    # Two nodes say what a message costs within one and between them.
    num_tasks = min(config.cluster.num_nodes, 2) * config.cluster.num_processes_per_node
    if num_tasks > 1 and config.model_profile.links_budget_s:
        key, args = f"{run.run_id}/profile/{profile_key}/links", (profile_key, hardware)
        jobs.append(_job(run, config, "profile-links", f"{_JOBS}:links", args, key, num_tasks=num_tasks))
    return jobs


def missing_jobs(
    run: RunDir, config: Config, profile_key: str, hardware: str, gaps: Sequence[Gap], since_s: int
) -> list[JobSpec]:
    """The jobs that add what a model profile lacks.

    `since_s` is when the profile was last added to: who looks again then finds the same jobs.
    """
    return [
        _job(
            run, config, f"profile-more-tp{gap.tp}-{gap.module}", f"{_JOBS}:main",
            (profile_key, hardware, str(gap.tp), gap.module, "0" if gap.is_unprobed else str(since_s)),
            f"{run.run_id}/profile/{profile_key}/since{since_s}/tp{gap.tp}/{gap.module}", num_tasks=gap.tp,
        )
        for gap in gaps
    ]  # fmt: skip


def reprofile_jobs(run: RunDir, config: Config, file: Path) -> list[JobSpec]:
    """The jobs that time again, beside the training, the doubts in a file: one per tensor-parallel degree."""
    table = run.cost_tables()[0]
    return [
        _job(
            run, config, f"reprofile-{file.stem}-tp{tp}", f"{_JOBS}:again",
            (table.profile_key, table.hardware, str(tp), str(file)),
            f"{run.run_id}/reprofile/{file.stem}/tp{tp}", num_tasks=tp,
        )
        for tp in sorted({doubt.tp for doubt in read_doubts(file)})
    ]  # fmt: skip


def has_place_beside(config: Config, plan: Plan) -> bool:
    """Whether a probing job finds a device beside the training; on Slurm it may wait for one in the queue."""
    cluster = config.cluster.spec()
    if cluster.backend == "slurm":
        return True
    return cluster.max_concurrency - plan.num_processes >= max(module.parallel.tp for module in plan.modules)


def train_job(run: RunDir, config: Config, mode: str, num_processes: int) -> JobSpec:
    """The training (`train`) or comparison (`compare`) job, one task per process of the plan."""
    entry, key = "dflop.jobs.train:main", train_key(run, mode)
    return _job(run, config, mode, entry, (mode,), key, num_tasks=num_processes, is_resumable=True)


def train_key(run: RunDir, mode: str) -> str:
    """Key of all jobs that train or compare, whatever plan they run: only one of them lives at a time."""
    return f"{run.run_id}/{mode}"


def _job(
    run: RunDir, config: Config, name: str, entry: str, args: tuple[str, ...], key: str, *,
    num_tasks: int, cpus_per_task: int = 0, array: str = "", is_resumable: bool = False,
) -> JobSpec:  # fmt: skip
    num_nodes, tasks_per_node = spread(num_tasks, config)
    cluster, slurm = config.cluster, config.cluster.slurm
    is_cuda = cluster.device == "cuda" and name[:4] != "data"
    cores_per_task = (cluster.num_cores_per_node or 0) // cluster.num_processes_per_node
    who_and_where = {"account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
    return JobSpec(
        name=f"{run.run_id}-{name}",
        entry=entry,
        args=(str(run.path), *args),
        key=key,
        folder=run.job_folder(array or name),
        resources=Resources(
            num_nodes=num_nodes,
            tasks_per_node=tasks_per_node,
            num_idle_slots=num_nodes * tasks_per_node - num_tasks,
            # Beside a GPU the cores decode media; without one a process computes on one thread.
            cpus_per_task=cpus_per_task or (max(1, cores_per_task) if is_cuda else 1),
            gpus_per_node=-(-tasks_per_node // cluster.ranks_per_gpu) if is_cuda else 0,
            # With GPUs the limit in the cluster file is the device's; host memory is left to the site.
            memory_bytes=0 if cluster.device == "cuda" else tasks_per_node * cluster.spec().memory_per_process_bytes,
            time_limit_min=slurm.time_limit_min,
            partition=slurm.partition,
            setup=slurm.setup,
            extra={option: value for option, value in who_and_where.items() if value} | slurm.extra,
        ),
        env={} if is_cuda else CPU_ENV,
        array=f"{run.run_id}-{array}" if array else "",
        is_resumable=is_resumable,
    )


def spread(num_tasks: int, config: Config) -> tuple[int, int]:
    """(nodes, tasks per full node) for `num_tasks`, on as few nodes as possible and as evenly as possible.

    Raises:
        LaunchError: the cluster has not that many places.
    """
    cluster = config.cluster
    num_nodes = -(-num_tasks // cluster.num_processes_per_node)
    if num_nodes > cluster.num_nodes:
        what = f"{num_tasks} processes do not fit on {cluster.num_nodes} nodes of {cluster.num_processes_per_node}"
        hint = "the plan is for another cluster: plan again"
        raise LaunchError(what, where=f"cluster `{cluster.name}`", hint=hint)
    return num_nodes, -(-num_tasks // num_nodes)
