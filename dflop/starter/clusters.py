"""The cluster section of a first configuration: this machine, or a partition of Slurm as sinfo has it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from dflop.cost.devices import find_device
from dflop.doctor.partition_limits import SINFO, NodeGroup, gpu_type, minutes, node_groups, num_gpus
from dflop.doctor.this_machine import find_gpus, memory_bytes
from dflop.errors import ConfigError, did_you_mean
from dflop.launch.commands import Command, run_command

_TIME_LIMIT_MIN = 240
_MAX_CPU_PROCESSES = 4
_UNKNOWN_GIB = 80.0


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """What a configuration says of a cluster."""

    lines: tuple[str, ...]
    """Lines of the cluster section."""
    num_processes: int
    has_gpus: bool
    is_here: bool
    """Whether it is this machine."""
    note: str
    """What has to be looked at."""


def find_cluster(name: str = "", command: Command = run_command) -> FoundCluster:
    """The cluster that is meant.

    Args:
        name: `slurm` for the partition with most GPUs, else cores; `slurm:NAME` for that partition; empty: this
            machine.
        command: Runs sinfo.

    Raises:
        ConfigError: another name, no Slurm here, no answer, no such partition, or none in use.
    """
    kind, _, partition = name.partition(":")
    if kind not in ("", "slurm"):
        raise ConfigError(f"`{name}` is no cluster", where="--cluster", hint="slurm, or slurm:PARTITION")
    return _of_slurm(_nodes(partition, command)) if kind else _this_machine()


def _this_machine() -> FoundCluster:
    gpus = find_gpus()
    each = len(gpus) or min(_MAX_CPU_PROCESSES, max(2, os.cpu_count() or 1))
    memory = min((g.memory_bytes for g in gpus), default=memory_bytes() // (each + 1))
    lines = (
        "# EDIT: this machine. On Slurm: `dflop init --cluster slurm`, or `cluster: FILE`, a copy of",
        "# configs/clusters/slurm_example.yaml.",
        "cluster:",
        "  name: this_machine",
        "  backend: local",
        f"  num_processes_per_node: {each}   # one per {'GPU' if gpus else 'core or so'}",
        f"  memory_per_process_gib: {max(0.5, round(memory / 2**30, 1))}   # a plan must fit in it",
        f"  device: {'cuda' if gpus else 'cpu'}",
    )
    return FoundCluster(lines, each, bool(gpus), True, "this machine; for Slurm: dflop init --cluster slurm")


def _nodes(partition: str, command: Command) -> NodeGroup:
    """The nodes that are alike with most GPUs, or else most cores, of a partition that is in use."""
    where = "--cluster"
    if shutil.which(SINFO[0]) is None:
        raise ConfigError("this machine has no sinfo", where=where, hint="run on a login node of the cluster")
    info = command(SINFO)
    if info.returncode != 0:
        first = next(iter(info.stderr.splitlines()), "no answer")
        raise ConfigError(f"sinfo fails: {first}", where=where, hint="dflop doctor says more")
    groups = node_groups(info.stdout)
    if partition and partition not in (names := {group.partition for group in groups}):
        raise ConfigError(f"no partition `{partition}`", where=where, hint=did_you_mean(partition, names))
    in_use = [g for g in groups if g.state == "up" and g.is_usable and partition in ("", g.partition)]
    if not in_use:
        of = f"partition `{partition}`" if partition else "any partition"
        raise ConfigError(f"no node of {of} is in use", where=where, hint="dflop doctor lists partitions")
    return max(in_use, key=lambda g: (num_gpus(g.gres) * g.num_nodes, g.num_cpus * g.num_nodes, g.is_default))


def _of_slurm(nodes: NodeGroup) -> FoundCluster:
    gpus, kind = num_gpus(nodes.gres), gpu_type(nodes.gres)
    each, num_nodes = gpus or min(_MAX_CPU_PROCESSES, nodes.num_cpus), int(min(nodes.num_nodes, nodes.max_nodes))
    memory_gib, memory_note, hardware = round(0.9 * nodes.memory_mib / 1024 / each, 1), "a plan must fit in it", "cpu"
    if gpus:
        try:
            device = find_device(kind)
            memory_gib, memory_note, hardware = round(device.memory_bytes / 2**30, 1), "by its data sheet", device.name
        except ConfigError:
            memory_gib, memory_note, hardware = _UNKNOWN_GIB, "EDIT: of a GPU, which sinfo does not tell", kind or "gpu"
    limit = int(min(_TIME_LIMIT_MIN, limit)) if (limit := minutes(nodes.time_limit)) == limit else _TIME_LIMIT_MIN
    lines = (
        "# From sinfo; all keys, with setup lines and containers: configs/clusters/slurm_example.yaml.",
        "cluster:",
        f"  name: {nodes.partition}",
        "  backend: slurm",
        f"  num_nodes: {num_nodes}   # the partition's; a job takes as few as its plan needs",
        f"  num_processes_per_node: {each}   # one per {'GPU' if gpus else 'core or so'}",
        f"  memory_per_process_gib: {memory_gib:g}   # {memory_note}",
        f"  device: {'cuda' if gpus else 'cpu'}",
        f"  num_cores_per_node: {nodes.num_cpus}",
        f"  hardware: {hardware}   # label of these nodes in the store",
        "  slurm:",
        f"    partition: {nodes.partition}",
        "    # account: NAME   # EDIT where the site wants one",
        *([f"    gpu_type: {kind}"] if kind else []),
        f"    time_limit_min: {limit}   # of a job; the partition allows {nodes.time_limit}",
    )
    what = f"{gpus} GPUs{f' ({kind})' * bool(kind)}" if gpus else f"{nodes.num_cpus} cores"
    note = f"{num_nodes} nodes of partition `{nodes.partition}` with {what} each, from sinfo; check account and limits"
    return FoundCluster(lines, num_nodes * each, bool(gpus), False, note)
