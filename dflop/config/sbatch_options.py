"""Every option of sbatch, of Slurm 22.05 and of later ones: computed by dflop, refused with a reason, or allowed.

Validation of `cluster.slurm.extra` and `srun_args`, the executor and so the doctor read this table. A site's plugins
add options, so an unknown name is refused only if it looks like a mistyped one.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence

from dflop.errors import did_you_mean

_SHORT_NAMES = (
    "a=array A=account b=begin B=extra-node-info c=cpus-per-task C=constraint d=dependency D=chdir e=error F=nodefile "
    "G=gpus h=help H=hold i=input J=job-name k=no-kill L=licenses m=distribution M=clusters n=ntasks N=nodes o=output "
    "O=overcommit p=partition q=qos Q=quiet s=oversubscribe S=core-spec t=time v=verbose V=version w=nodelist W=wait "
    "x=exclude"
)
_SHORT = dict(pair.split("=") for pair in _SHORT_NAMES.split())
_ALIASES = {"cluster": "clusters", "share": "oversubscribe", "workdir": "chdir"}

COMPUTED = {
    "array": "a job per shard or module; see cluster.slurm.max_jobs_at_once, data_profile.num_shards",
    "chdir": "the directory that dflop is started in",
    "comment": "the run's id",
    "cpus-per-task": "see cluster.num_cores_per_node, data_profile.num_workers",
    "error": "a file in the job's folder",
    "job-name": "run and step; see `name`",
    "no-requeue": "see cluster.slurm.requeue",
    "nodes": "see cluster.num_nodes",
    "ntasks": "by the plan",
    "ntasks-per-node": "see cluster.num_processes_per_node",
    "open-mode": "logs of all starts of a job are kept",
    "output": "a file in the job's folder",
    "requeue": "see cluster.slurm.requeue",
    "signal": "see cluster.slurm.signal_delay_s",
    "time": "see cluster.slurm.time_limit_min",
}
"""By dflop: how, or from which key."""
_ONE_GPU = "each task would see one GPU, number 0, but ranks choose theirs by local rank; see cluster.slurm.gpus"
_CLUSTER = "squeue and scancel would ask another cluster than sbatch: `export SLURM_CLUSTERS=NAME` before dflop instead"
_ANSWER = "it changes what sbatch prints or does, and dflop reads the job's id there"
_CONTAINER = "the batch script needs the host's commands; see cluster.slurm.container"
_ENVIRONMENT = "tasks need the variables that the batch script exports; see cluster.slurm.setup"
_USER = "job folders are private to the user who runs dflop"
REFUSED = {
    **dict.fromkeys(("gpus-per-task", "ntasks-per-gpu", "gpu-bind", "tres-per-task", "tres-bind"), _ONE_GPU),
    **dict.fromkeys(("gpus", "gpus-per-socket"), "jobs differ in size and need GPUs per node; see cluster.slurm.gpus"),
    "cpus-per-gpu": "sbatch takes it or --cpus-per-task, which dflop computes; see cluster.num_cores_per_node",
    "clusters": _CLUSTER,
    "cluster-constraint": _CLUSTER,
    **dict.fromkeys(("help", "parsable", "quiet", "test-only", "usage", "verbose", "version", "wait", "wrap"), _ANSWER),
    **dict.fromkeys(("container", "container-id", "container-image", "container-mounts"), _CONTAINER),
    **dict.fromkeys(("export", "export-file"), _ENVIRONMENT),
    **dict.fromkeys(("uid", "gid"), _USER),
    "distribution": "ranks of a tensor-parallel group must be neighbours on a node, as Slurm's default places them",
    "no-kill": "ranks of a lost node would be waited for",
}
_ALLOWED_NAMES = (
    "account acctg-freq batch bb bbf begin constraint contiguous core-spec cores-per-socket cpu-freq deadline "
    "delay-boot dependency exclude exclusive extra extra-node-info get-user-env gpu-freq gpus-per-node gres gres-flags "
    "hint hold ignore-pbs input kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu "
    "mem-per-gpu mincpus network nice nodefile nodelist ntasks-per-core ntasks-per-socket oom-kill-step overcommit "
    "oversubscribe partition power prefer priority profile propagate qos reboot reservation resv-ports segment "
    "sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time-min tmp use-min-nodes "
    "wait-all-nodes wckey"
)
ALLOWED = frozenset(_ALLOWED_NAMES.split())
_OF_TASKS = "it would change which tasks run where; a job has one srun for all of them"
_OF_LOGS = "dflop reads the logs of tasks and srun's messages"
_SRUN = {
    **{name: COMPUTED[name] for name in ("cpus-per-task", "error", "open-mode", "output")},
    **dict.fromkeys(("gpus-per-task", "ntasks-per-gpu", "gpu-bind", "tres-per-task", "tres-bind"), _ONE_GPU),
    **{name: REFUSED[name] for name in ("clusters", "distribution", "no-kill", "uid", "gid", "test-only")},
    "export": f"{_ENVIRONMENT}; --export=ALL,NAME=VALUE adds to them",
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "relative", "het-group", "jobid", "multi-prog"), _OF_TASKS),
    **dict.fromkeys(("label", "pty", "quiet", "unbuffered", "help", "usage", "version"), _OF_LOGS),
    "kill-on-bad-exit": "the peers of a task that failed would be waited for",
    "immediate": "a job whose nodes take a moment would fail",
    "no-allocate": "tasks run in the job's allocation",
}
"""What `srun_args` may not hold; all else is passed on."""
_SRUN_SHORT = _SHORT | {"K": "kill-on-bad-exit", "l": "label", "r": "relative", "u": "unbuffered", "Z": "no-allocate"}
_SRUN_SHORT |= {"I": "immediate"}
_HARMLESS = {"distribution": r"(block|\*)(:.*)?", "export": r"(.*,)?ALL(,.*)?", "gpu-bind": r"(v\w*,)?none"}
"""Values of refused options that leave everything as it is, or are what a site's own default needs."""


def canonical(name: str) -> str:
    """An option as sbatch's manual lists it: `gpus_per_task` and `w` are `gpus-per-task` and `nodelist`."""
    name = _SHORT.get(name, name).replace("_", "-")
    return _ALIASES.get(name, name)


def problem_of(name: str, value: str) -> str:
    """Why an option of sbatch, in its canonical form, may not have a value; empty where it may."""
    if _is_harmless(name, value):
        return ""
    if name in COMPUTED:
        return f"is computed by dflop: {COMPUTED[name]}"
    if name in REFUSED:
        return f"is refused: {REFUSED[name]}"
    known = {*COMPUTED, *REFUSED, *ALLOWED}
    if name not in known and (near := difflib.get_close_matches(name, known, cutoff=0.8)):
        return f"is no option of sbatch: {did_you_mean(name, near)}"
    return ""


def srun_problems(words: Sequence[str]) -> Iterator[str]:
    """Why options among srun's arguments may not be set."""
    for word, following in itertools.pairwise([*words, ""]):
        long, short = re.match(r"--([a-z0-9_-]+)=?", word), re.match(r"-([A-Za-z])", word)
        name = long[1].replace("_", "-") if long else _SRUN_SHORT.get(short[1], "") if short else ""
        value = (word[long.end() :] if long else word[2:]) or following
        if name in _SRUN and not _is_harmless(name, value):
            yield f"`{word}` of srun is refused: {_SRUN[name]}"


def _is_harmless(name: str, value: str) -> bool:
    return name in _HARMLESS and re.fullmatch(_HARMLESS[name], value) is not None
