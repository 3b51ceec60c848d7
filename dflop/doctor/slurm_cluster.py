"""The Slurm that this machine's clients know: partitions, GPUs, whether the jobs of a configuration would start there.

Nothing is submitted: `sbatch --test-only` gets the options with which the launcher submits, answers when a job would
start, and makes none. What it says yes to although it never starts is found by `partition_limits.py`. Clients that know
no cluster are one finding; that each of them says so in its own words helps nobody.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence

from dflop.config import ClusterConfig, Config
from dflop.config.slurm_refusals import keys_of_refusal
from dflop.doctor import partition_limits
from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from dflop.doctor.partition_limits import NodeGroup
from dflop.errors import DflopError, did_you_mean
from dflop.launch import JobSpec
from dflop.launch.commands import Command, job_environment, run_command
from dflop.launch.executor import Executor
from dflop.launch.slurm import comment_of
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.run.lifecycle import absolute
from dflop.run.queue import site_of
from dflop.steps import submit
from dflop.units import seconds

AREA = "Slurm"
MAX_SKEW_S = 60.0
CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_NO_SLURM = "without it, jobs run on this machine: cluster.backend local"
_NO_CLUSTER = (
    "run on a login node, or set SLURM_CONF to the cluster's slurm.conf; without a cluster, jobs run on this "
    "machine: cluster.backend local"
)


def slurm(config: Config | None = None, command: Command = run_command) -> Iterator[Finding]:
    """Findings about Slurm, by the jobs of a configuration or (None) the site's defaults."""
    is_wanted = config is not None and config.cluster.backend == "slurm"
    missing = [name for name in CLIENTS if shutil.which(name) is None]
    if missing:
        status = FAIL if is_wanted else SKIP
        advice = "run on a login node of the cluster" if is_wanted else _NO_SLURM
        yield Finding(AREA, "commands", status, f"not on PATH: {', '.join(missing)}", advice)
        return
    info = command(partition_limits.SINFO)
    if info.returncode != 0:
        yield _no_answer(_first_line(info.stderr), is_wanted)
        return
    version = _first_line(command(["sbatch", "--version"]).stdout)
    yield Finding(AREA, "commands", OK, version or "installed")
    groups, cluster = partition_limits.node_groups(info.stdout), config.cluster if config and is_wanted else None
    yield _partitions(groups, cluster)
    gres = sorted({group.gres for group in groups if group.gres not in ("", "(null)")})
    if not gres and cluster is not None and cluster.device == "cuda":
        advice = "GPUs cannot be requested by count here: cluster.slurm.gpus: none, if nodes come with all of theirs"
        yield Finding(AREA, "GRES", WARN, "none: no partition counts GPUs", advice)
    else:
        yield Finding(AREA, "GRES", OK, ", ".join(gres) or "none: no partition counts GPUs")
    if config is None or cluster is None:
        is_taken, message = _test_only({"job-name": "dflop-doctor", "time": "1"}, command)
        # Sites may want an account or a partition of everybody, which only a configuration knows.
        advice = "" if is_taken else "add the configuration: dflop doctor CONFIG"
        yield Finding(AREA, "submitting", OK if is_taken else WARN, message, advice)
    else:
        yield from _jobs(config, groups, command)
    yield _accounting(command)
    yield _requeueing(command)
    yield _clocks(command)


def _no_answer(message: str, is_wanted: bool) -> Finding:
    status = FAIL if is_wanted else WARN
    if "contact slurm controller" in message or "Connection refused" in message:
        advice = "slurmctld is down or unreachable: ask the cluster's operator"
        return Finding(AREA, "commands", status, f"the controller does not respond: {message}", advice)
    return Finding(AREA, "commands", status, f"find no cluster: {message}", _NO_CLUSTER)


def _partitions(groups: Sequence[NodeGroup], cluster: ClusterConfig | None) -> Finding:
    by_name = {name: [g for g in groups if g.partition == name] for name in dict.fromkeys(g.partition for g in groups)}
    shown = ", ".join(
        f"{name}{'*' * of[0].is_default} {of[0].state} {sum(g.num_nodes for g in of)} nodes, limit {of[0].time_limit}"
        for name, of in by_name.items()
    )
    wanted = cluster.slurm.partition.split(",") if cluster and cluster.slurm.partition else []
    for name in wanted:
        if name not in by_name:
            advice = f"cluster.slurm.partition: {did_you_mean(name, set(by_name))}"
            return Finding(AREA, "partitions", FAIL, f"no partition `{name}`", advice)
    if not any(group.state == "up" for group in groups):
        return Finding(AREA, "partitions", FAIL, shown or "none", "ask the cluster's operator")
    return Finding(AREA, "partitions", OK, shown)


def _jobs(config: Config, groups: Sequence[NodeGroup], command: Command) -> Iterator[Finding]:
    """A finding or more per shape of job that a run of this configuration submits."""
    config = absolute(config)
    try:
        shapes = job_shapes(config, RunDir(config.runs / "doctor"))
    except DflopError as error:
        yield Finding(AREA, "submitting", FAIL, error.what, error.hint)
        return
    for name, _, wanted in shapes:
        yield from _job(f"submitting {name}", wanted, config, groups, command)


def job_shapes(config: Config, run: RunDir) -> list[tuple[str, JobSpec, Mapping[str, str]]]:
    """(name, one job, its options as the launcher submits it) of each shape of job in a run; flags have empty values.

    Raises:
        DflopError: the cluster has too few places.
    """
    training = submit.train_job(run, config, TRAIN, config.cluster.spec().num_processes)
    profiles = submit.model_jobs(run, config, "", "", ("llm",))
    found: list[tuple[str, JobSpec, Mapping[str, str]]] = []
    tried = list[Mapping[str, str]]()
    for spec in (submit.data_jobs(run, config, "", "slurm")[0], *profiles, training):
        wanted = Executor([spec], site_of(run, config), comment_of(run.run_id)).options()
        shape = {option: value for option, value in wanted.items() if option not in ("job-name", "output", "error")}
        if shape not in tried:
            tried.append(shape)
            found.append((spec.name.removeprefix(f"{run.run_id}-"), spec, wanted))
    return found


def _job(
    name: str, wanted: Mapping[str, str], config: Config, groups: Sequence[NodeGroup], command: Command
) -> Iterator[Finding]:
    ok, message = _test_only(wanted, command)
    usual = {"partition": os.environ.get("SBATCH_PARTITION", "")}  # sbatch's default
    obstacles = partition_limits.obstacles(usual | dict(wanted), groups)
    extra = "; or cluster.slurm.extra" if config.cluster.slurm.extra else ""
    for obstacle in obstacles:
        what = f"{obstacle.what}{': it would never start' if obstacle.is_for_ever else ''}"
        yield Finding(AREA, name, FAIL if obstacle.is_for_ever else WARN, what, f"{obstacle.hint}{extra}")
    if not ok:
        keys = keys_of_refusal(message)
        tried = " ".join(_flags(wanted))
        yield Finding(AREA, name, FAIL, message, f"check {keys}{extra}; the options tried: {tried}")
    elif not obstacles:
        yield Finding(AREA, name, OK, message)


def _test_only(wanted: Mapping[str, str], command: Command) -> tuple[bool, str]:
    """(whether a job would be accepted, what sbatch says of it)."""
    done = command(["sbatch", "--test-only", *_flags(wanted), "--wrap=true"], job_environment(os.environ, wanted))
    message = _first_line(done.stderr or done.stdout).removeprefix("sbatch: ")
    return done.returncode == 0, message or "a job would be accepted"


def _flags(wanted: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" if value else f"--{name}" for name, value in wanted.items()]


def _accounting(command: Command) -> Finding:
    done = command(["sacct", "--noheader", "--allocations", "--starttime=now-1minutes", "--format=JobID"])
    if done.returncode == 0 and "disabled" not in done.stderr:
        return Finding(AREA, "accounting", OK, "sacct answers")
    message = _first_line(done.stderr) or f"sacct ended with {done.returncode}"
    advice = "dflop then relies on squeue and exit files"
    return Finding(AREA, "accounting", WARN, f"does not work: {message}", advice)


def _requeueing(command: Command) -> Finding:
    shown = command(["scontrol", "show", "config"]).stdout
    found = dict(re.findall(r"^(JobRequeue|KillWait|PreemptMode)\s*=\s*(.+?)\s*$", shown, re.MULTILINE))
    detail = ", ".join(f"{name} {value}" for name, value in found.items())
    if not found:
        return Finding(AREA, "requeueing", WARN, "not in scontrol show config", "ask the operator")
    if found.get("JobRequeue", "1").startswith("0"):
        advice = "preempted jobs are not requeued; dflop run resubmits training while it runs"
        return Finding(AREA, "requeueing", WARN, detail, advice)
    return Finding(AREA, "requeueing", OK, detail)


def _clocks(command: Command) -> Finding:
    shown, now_s = command(["sdiag"]).stdout, time.time()
    found = re.search(r"^sdiag output at .*\((\d+)\)", shown, re.MULTILINE)
    if found is None:
        return Finding(AREA, "clocks", SKIP, "sdiag does not say the controller's time")
    apart_s = abs(now_s - int(found[1]))
    detail = f"the controller's and this machine's differ by {seconds(apart_s)}"
    advice = "times in logs and reports are off; jobs work all the same: ask the operator"
    return Finding(AREA, "clocks", WARN if apart_s > MAX_SKEW_S else OK, detail, advice)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""
