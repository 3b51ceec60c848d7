"""One real job of a few seconds per shape of a run's jobs: where this site differs from what it was asked for.

`sbatch --test-only` does not say what a site's job_submit plugin makes of a job, what its nodes see, which GPUs a task
gets and whether a signal arrives. All jobs are submitted together; whatever ends the trial cancels them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflop import __version__
from dflop.config import Config
from dflop.doctor.finding import FAIL, OK, WARN, Finding
from dflop.doctor.partition_limits import minutes
from dflop.doctor.slurm_cluster import job_shapes
from dflop.errors import DflopError
from dflop.launch import JobHandle, JobSpec
from dflop.launch.commands import job_environment, on_cluster, run_command
from dflop.launch.slurm import SlurmLauncher
from dflop.launch.watcher import NEVER
from dflop.run.directory import RunDir
from dflop.run.lifecycle import absolute
from dflop.run.queue import site_of
from dflop.units import seconds

AREA = "Slurm, by trial jobs"
LIMIT_MIN, LOOK_EVERY_S, NUM_REMOVALS = 5, 1.0, 5
SKEW_S = 60.0
"""Clocks that differ by less are not worth a warning: shared file systems show files late."""


def trial(config: Config, *, poll_interval_s: float = 5.0) -> Iterator[Finding]:
    """Findings from jobs that are submitted for them, as those end."""
    config = absolute(config)
    config.runs.mkdir(parents=True, exist_ok=True)
    with (
        _folder(config.runs) as folder,
        tempfile.NamedTemporaryFile(prefix="dflop-doctor-") as here,
    ):
        run = RunDir(folder)
        try:
            shapes = job_shapes(config, run)
            specs = [_short(name, spec, config, run, here.name) for name, spec, _ in shapes]
            site = site_of(run, config).model_copy(update={"poll_interval_s": poll_interval_s})
            launcher = SlurmLauncher(run_id=run.run_id, site=site)
            handles = launcher.submit_all(specs)
        except DflopError as error:
            yield Finding(AREA, "submitting", FAIL, error.what, error.hint)
            return
        shown = ", ".join(f"{name} ({handle.id})" for handle, (name, *_) in zip(handles, shapes, strict=True))
        yield Finding(AREA, "submitted", OK, f"{shown}; Ctrl-C cancels them")
        try:
            for handle, (name, spec, wanted) in zip(handles, shapes, strict=True):
                yield from _changes(name, handle, spec, wanted)
            ready_s, stuck = _follow(launcher, handles, run.path)
            for handle, (name, spec, _) in zip(handles, shapes, strict=True):
                try:
                    seen = launcher.collect(handle)
                except DflopError as error:
                    yield Finding(AREA, name, FAIL, stuck.get(name, error.what), error.hint)
                else:
                    yield from _judged(name, spec, seen, ready_s.get(name, 0.0))
        finally:
            launcher.cancel(*handles)


@contextlib.contextmanager
def _folder(runs: Path) -> Iterator[Path]:
    """A folder that is removed afterwards, again where a job writes its last lines meanwhile."""
    folder = Path(tempfile.mkdtemp(dir=runs, prefix=".doctor-"))
    try:
        yield folder
    finally:
        for _ in range(NUM_REMOVALS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(LOOK_EVERY_S)


def _short(name: str, spec: JobSpec, config: Config, run: RunDir, here: str) -> JobSpec:
    """The trial of a job: the same request, with little to do."""
    d, folder = config.dataset, run.path / name
    folder.mkdir()
    paths = [d.annotations, d.media_root, d.tokenizer, *([config.model.weights] if config.model.weights else [])]
    paths += [config.store] if config.store.exists() else []
    is_cuda = spec.resources.gpus_per_node > 0
    args = (str(folder), json.dumps([str(path) for path in paths]), here, "cuda" if is_cuda else "cpu")
    resources = replace(spec.resources, time_limit_min=min(LIMIT_MIN, spec.resources.time_limit_min))
    return replace(
        spec, entry="dflop.doctor.on_node:look", args=args, key=name, folder=run.job_folder(name), array="",
        resources=resources, is_resumable=False,
    )  # fmt: skip


def _follow(
    launcher: SlurmLauncher, handles: Sequence[JobHandle], folder: Path
) -> tuple[dict[str, float], dict[str, str]]:
    """Waits for the ends of jobs and signals each once all its tasks are ready.

    Returns, by key: seconds by which the clock of its nodes was ahead then; why a cancelled job would never start.
    """
    ready_s, stuck = dict[str, float](), dict[str, str]()
    live = list(handles)
    while live:
        for handle in live:
            os.listdir(folder / handle.key)  # makes NFS clients look again
            if handle.key not in ready_s and len([*(folder / handle.key).glob("ready-*")]) == handle.num_tasks:
                written = [float(path.read_text()) for path in (folder / handle.key).glob("ready-*")]
                ready_s[handle.key] = max(written) - time.time()
                launcher.interrupt(handle)
        statuses = list(zip(live, launcher.poll_all(live), strict=True))
        for handle, status in statuses:
            if NEVER in status.reason and handle.key not in stuck:
                stuck[handle.key] = status.reason
                launcher.cancel(handle)
        live = [handle for handle, status in statuses if not status.state.is_final]
        time.sleep(LOOK_EVERY_S if live else 0)
    return ready_s, stuck


def _changes(name: str, handle: JobHandle, spec: JobSpec, wanted: Mapping[str, str]) -> Iterator[Finding]:
    """What the site has made of the options."""
    shown = run_command(["scontrol", *on_cluster(handle.cluster), "show", "job", "-o", handle.job_id]).stdout
    got = dict(re.findall(r"(?:^| )([A-Z][\w/]*)=(\S*)", shown))
    asked = {
        "JobName": handle.name,
        "Comment": wanted["comment"],
        "Partition": wanted.get("partition", ""),
        "Account": wanted.get("account", ""),
        "QOS": wanted.get("qos", ""),
        "NumTasks": str(spec.resources.num_tasks),
        "CPUs/Task": wanted["cpus-per-task"],
    }
    changed = [f"{key} {want} is {got[key]}" for key, want in asked.items() if want and got.get(key, want) != want]
    limit_min = min(LIMIT_MIN, spec.resources.time_limit_min)
    if minutes(got.get("TimeLimit", "")) < limit_min:
        changed.append(f"TimeLimit {limit_min} min is {got['TimeLimit']}")
    if changed:
        advice = "name and comment do not matter to dflop; for the rest see cluster.slurm, or ask the operator"
        yield Finding(AREA, f"{name}: options", WARN, f"changed by the site: {'; '.join(changed)}", advice)


def _judged(name: str, spec: JobSpec, seen: Sequence[Mapping[str, Any]], ahead_s: float) -> Iterator[Finding]:
    """What the tasks of a job saw."""
    hosts = sorted({task["host"] for task in seen})
    if len(hosts) != spec.resources.num_nodes:
        what = f"{len(seen)} tasks on {len(hosts)} nodes, {spec.resources.num_nodes} were requested"
        yield Finding(AREA, f"{name}: nodes", FAIL, what, "see cluster.num_processes_per_node, cluster.slurm.extra")
    for task in seen:
        where = f"rank {task['rank']} on {task['host']}"
        if task["missing"]:
            what = f"{where} does not see {', '.join(task['missing'])}"
            advice = "keep dataset, weights and store on a file system that the nodes share"
            yield Finding(AREA, f"{name}: folders", FAIL, what, advice)
        if task["version"] != __version__:
            what = f"{where} has dflop {task['version']} in {task['python']}, this machine has {__version__}"
            yield Finding(AREA, f"{name}: dflop", FAIL, what, "install the same version")
        if spec.resources.gpus_per_node and task["num_gpus"] <= task["local_rank"]:
            what = f"{where} is number {task['local_rank']} on its node and sees {task['num_gpus']} GPUs"
            advice = "each task must see all GPUs of its job on the node: cluster.slurm.gpus, cluster.slurm.srun_args"
            yield Finding(AREA, f"{name}: GPUs", FAIL, what, advice)
    deaf = [str(task["rank"]) for task in seen if not task["is_signalled"]]
    if deaf:
        what = f"SIGUSR2 did not reach ranks {', '.join(deaf)}"
        advice = "training then loses the steps since its last checkpoint at a time limit: lower train.checkpoint_every"
        yield Finding(AREA, f"{name}: signal", WARN, what, advice)
    lacking = sorted(set(job_environment(os.environ)) - set(seen[0]["variables"]))
    if lacking:
        advice = "if jobs need them, `export` them in cluster.slurm.setup"
        yield Finding(AREA, f"{name}: environment", WARN, f"tasks lack {', '.join(lacking)}", advice)
    if abs(ahead_s) > SKEW_S:
        what = f"clocks of {', '.join(hosts)} and of this machine differ by {seconds(abs(ahead_s))}"
        yield Finding(AREA, f"{name}: clocks", WARN, what, "times in logs and reports are off; jobs work all the same")
    tmp = "shared with this machine" if seen[0]["shares_tmp"] else "each node's own"
    yield Finding(AREA, name, OK, f"{len(seen)} tasks on {', '.join(hosts)}; {tempfile.gettempdir()} is {tmp}")
