"""The Slurm that this machine's clients know: partitions, GPUs, whether a job would be taken, what happens to it then.

Nothing is submitted: `sbatch --test-only` answers when a job would start, and makes none. Clients that know no cluster
are one finding; that each of them says so in its own words helps nobody.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Sequence

from dflop.config import ClusterConfig
from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from dflop.errors import did_you_mean
from dflop.launch.answers import time_of_day
from dflop.launch.commands import Command, run_command
from dflop.launch.site import Site

AREA = "Slurm"
CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_NO_SLURM = "jobs run on this machine then: cluster.backend local"
_NO_CLUSTER = (
    "run on a login node, or say in SLURM_CONF where the cluster's slurm.conf is; without a cluster, jobs run on this "
    "machine: cluster.backend local"
)


def slurm(cluster: ClusterConfig | None = None, command: Command = run_command) -> Iterator[Finding]:
    """Findings about Slurm.

    Args:
        cluster: Of a configuration, whose partition and options are tried; None: the site's defaults.
        command: Runs a client; replaced in tests.
    """
    is_wanted = cluster is not None and cluster.backend == "slurm"
    missing = [name for name in CLIENTS if shutil.which(name) is None]
    if missing:
        status = FAIL if is_wanted else SKIP
        advice = "run on a login node of the cluster" if is_wanted else _NO_SLURM
        yield Finding(AREA, "commands", status, f"not on PATH: {', '.join(missing)}", advice)
        return
    info = command(["sinfo", "--noheader", "--format=%P|%a|%D|%l|%G"])
    if info.returncode != 0:
        yield _no_answer(_first_line(info.stderr), is_wanted)
        return
    version = _first_line(command(["sbatch", "--version"]).stdout)
    yield Finding(AREA, "commands", OK, version or "installed")
    rows = [line.split("|") for line in info.stdout.splitlines() if line.count("|") == 4]
    yield _partitions(rows, cluster if is_wanted else None)
    yield _gres(rows, cluster if is_wanted else None)
    yield _submitting(cluster if is_wanted else None, command)
    yield _accounting(command)
    yield _requeueing(command)


def _no_answer(said: str, is_wanted: bool) -> Finding:
    status = FAIL if is_wanted else WARN
    if "contact slurm controller" in said or "Connection refused" in said:
        advice = "slurmctld is down or out of reach: ask the cluster's operator"
        return Finding(AREA, "commands", status, f"the controller does not answer: {said}", advice)
    return Finding(AREA, "commands", status, f"know no cluster: {said}", _NO_CLUSTER)


def _partitions(rows: Sequence[Sequence[str]], cluster: ClusterConfig | None) -> Finding:
    shown = [f"{name} {state} {nodes} nodes, limit {limit}" for name, state, nodes, limit, _ in rows]
    names = [row[0].rstrip("*") for row in rows]
    wanted = cluster.slurm.partition if cluster else ""
    if wanted and wanted not in names:
        detail = f"no partition `{wanted}`"
        return Finding(AREA, "partitions", FAIL, detail, f"cluster.slurm.partition: {did_you_mean(wanted, set(names))}")
    if not any(state == "up" for _, state, *_ in rows):
        return Finding(AREA, "partitions", FAIL, ", ".join(shown) or "none", "ask the cluster's operator")
    return Finding(AREA, "partitions", OK, ", ".join(shown))


def _gres(rows: Sequence[Sequence[str]], cluster: ClusterConfig | None) -> Finding:
    found = sorted({row[4] for row in rows if row[4] not in ("", "(null)")})
    if found:
        return Finding(AREA, "GRES", OK, ", ".join(found))
    if cluster is not None and cluster.device == "cuda":
        advice = "GPUs cannot be asked for by count here: cluster.slurm.gpus: none, if nodes come with all of theirs"
        return Finding(AREA, "GRES", WARN, "none: no partition counts GPUs", advice)
    return Finding(AREA, "GRES", OK, "none: no partition counts GPUs")


def _submitting(cluster: ClusterConfig | None, command: Command) -> Finding:
    options = ["--job-name=dflop-doctor", "--time=1"]
    if cluster is not None:
        options += [f"--nodes={cluster.num_nodes}", f"--ntasks-per-node={cluster.num_processes_per_node}"]
        s = cluster.slurm
        named = {"partition": s.partition, "account": s.account, "qos": s.qos, "constraint": s.constraint}
        num_gpus = cluster.num_processes_per_node if cluster.device == "cuda" else 0
        gpus = Site(gpus=s.gpus, gpu_type=s.gpu_type).gpu_options(num_gpus)
        for name, value in {**{n: v for n, v in named.items() if v}, **gpus, **s.extra}.items():
            options.append(f"--{name}={value}" if value else f"--{name}")
    done = command(["sbatch", "--test-only", *options, "--wrap=true"])
    said = _first_line(done.stderr or done.stdout).removeprefix("sbatch: ")
    if done.returncode == 0:
        return Finding(AREA, "submitting", OK, _with_time_of_day(said) or "a job would be taken")
    if cluster is None:
        # Sites may want an account or a partition of everybody, which only a configuration knows.
        return Finding(AREA, "submitting", WARN, said, "give the configuration: dflop doctor CONFIG")
    advice = "check nodes, partition and options in the cluster section; the options tried: " + " ".join(options)
    return Finding(AREA, "submitting", FAIL, said, advice)


def _with_time_of_day(said: str) -> str:
    """Slurm's clients are asked for seconds since the epoch, which people do not read."""
    return re.sub(r"(?<=to start at )\d+", lambda m: time_of_day(float(m[0]), time.time()), said)


def _accounting(command: Command) -> Finding:
    done = command(["sacct", "--noheader", "--allocations", "--starttime=now-1minutes", "--format=JobID"])
    if done.returncode == 0 and "disabled" not in done.stderr:
        return Finding(AREA, "accounting", OK, "sacct answers")
    said = _first_line(done.stderr) or f"sacct ended with {done.returncode}"
    advice = "dflop goes by squeue and exit files then"
    return Finding(AREA, "accounting", WARN, f"does not work: {said}", advice)


def _requeueing(command: Command) -> Finding:
    shown = command(["scontrol", "show", "config"]).stdout
    found = dict(re.findall(r"^(JobRequeue|KillWait|PreemptMode)\s*=\s*(.+?)\s*$", shown, re.MULTILINE))
    detail = ", ".join(f"{name} {value}" for name, value in found.items())
    if not found:
        return Finding(AREA, "requeueing", WARN, "scontrol show config says nothing of it", "ask the operator")
    if found.get("JobRequeue", "1").startswith("0"):
        advice = "preempted jobs end instead of coming back; dflop run submits training again while it lives"
        return Finding(AREA, "requeueing", WARN, detail, advice)
    return Finding(AREA, "requeueing", OK, detail)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""
