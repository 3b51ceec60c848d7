"""What a partition's limits and nodes say of a job, which `sbatch --test-only` says yes to although it never starts.

With EnforcePartLimits=NO, Slurm's default, a job over a limit of its partition is taken and waits for ever
(PartitionTimeLimit, PartitionNodeLimit, PartitionDown). sinfo knows the limits, and what nodes have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dflop.config.slurm_refusals import KEYS

SINFO = ("sinfo", "--noheader", "--exact", "--format=%P|%a|%l|%s|%D|%c|%m|%G|%t")
"""Partition, its state, limits of time and of nodes; nodes that are alike: how many, CPUs, MiB, GRES, state."""
_OUT_OF_USE = ("down", "drain", "drng", "fail", "unk")
_GPUS = r"\bgpu:(?:([^:(),]+):)?(\d+)(?=[(,]|$)"
"""(type, number) in `gpu:8`, `gpu:a100:8(S:0-1)`."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

    partition: str
    is_default: bool
    state: str
    """State of the partition: `up`, `down`, `drain`, `inact`."""
    time_limit: str
    max_nodes: float
    num_nodes: int
    num_cpus: int
    memory_mib: int
    gres: str
    is_usable: bool


class Obstacle(NamedTuple):
    """Why a job does not start."""

    what: str
    hint: str
    """Names the key of the configuration."""
    is_for_ever: bool = True


def node_groups(answer: str) -> list[NodeGroup]:
    """What sinfo answers to `SINFO`; lines that are none of it are left out."""
    found = []
    for line in answer.splitlines():
        match line.split("|"):
            case [name, state, limit, size, count, cpus, memory, gres, node_state] if (count + cpus + memory).isdigit():
                _, _, largest = size.rpartition("-")
                max_nodes = float(largest) if largest.isdigit() else math.inf
                is_usable = not node_state.startswith(_OUT_OF_USE)
                numbers, is_default = (int(count), int(cpus), int(memory)), name.endswith("*")
                group = NodeGroup(name.rstrip("*"), is_default, state, limit, max_nodes, *numbers, gres, is_usable)
                found.append(group)
    return found


def obstacles(options: Mapping[str, str], groups: Sequence[NodeGroup]) -> list[Obstacle]:
    """Why a job of these options of sbatch does not start; of several partitions, in the one where it lacks least."""
    named = options.get("partition", "")
    names = named.split(",") if named else [g.partition for g in groups if g.is_default][:1]
    found = [list(_in_partition(options, [g for g in groups if g.partition == name])) for name in names]
    return min(found, key=len, default=[])


def _in_partition(options: Mapping[str, str], groups: Sequence[NodeGroup]) -> Iterator[Obstacle]:
    if not groups:
        return  # sbatch itself refuses a partition that is not there
    first, num_nodes = groups[0], _count(options.get("nodes", "1").partition("-")[0]) or 1
    name = f"partition `{first.partition}`"
    if first.state != "up":
        yield Obstacle(f"{name} is {first.state}", f"{KEYS['partition']}: choose another one, or ask the operator")
    if minutes(options.get("time", "")) > minutes(first.time_limit):
        what = f"the job asks for --time={options['time']}, {name} allows {first.time_limit}"
        yield Obstacle(what, f"{KEYS['time']}: lower it, or {KEYS['partition']}: choose another one")
    total = sum(group.num_nodes for group in groups)
    if num_nodes > min(first.max_nodes, total):
        what = f"the job asks for {num_nodes} nodes, {name} "
        what += f"has {total}" if num_nodes > total else f"allows {first.max_nodes:g}"
        yield Obstacle(what, f"{KEYS['nodes']}: fewer, or {KEYS['partition']}: choose another one")
        return
    yield from _of_nodes(options, groups, num_nodes, name)


def _of_nodes(options: Mapping[str, str], groups: Sequence[NodeGroup], num_nodes: int, name: str) -> Iterator[Obstacle]:
    cpus = _count(options.get("ntasks-per-node", "1")) * _count(options.get("cpus-per-task", "1"))
    # (type, number per node) of the GPUs that it asks for; no type where any will do.
    text = f"gpu:{options['gpus-per-node']}" if "gpus-per-node" in options else options.get("gres", "")
    kind, number = (re.findall(_GPUS, text) or [("", "0")])[0]
    gpus = int(number)
    memory = _memory_mib(options, cpus, gpus)
    of_node: tuple[tuple[str, str, float, Callable[[NodeGroup], float]], ...] = (
        ("cpus", "CPUs", cpus, lambda group: group.num_cpus),
        ("memory", "MiB of memory", memory, lambda group: group.memory_mib),
        ("gpus", f"GPUs{f' of type {kind}' * bool(kind)}", gpus, lambda group: num_gpus(group.gres, kind)),
    )
    lacking = [of for of in of_node if sum(g.num_nodes for g in groups if of[3](g) >= of[2]) < num_nodes]
    for key, unit, wanted, has in lacking:
        most = max(map(has, groups))
        what = f"the job asks for {wanted:g} {unit} on each of {num_nodes} nodes, those of {name} have {most:g}"
        yield Obstacle(what, KEYS[key])
    if lacking:
        return
    enough = [group for group in groups if all(has(group) >= wanted for *_, wanted, has in of_node)]
    total, usable = sum(g.num_nodes for g in enough), sum(g.num_nodes for g in enough if g.is_usable)
    if total < num_nodes:
        what = f"{num_nodes} nodes of {name} that have {cpus} CPUs, {memory:g} MiB and {gpus} GPUs: there are {total}"
        yield Obstacle(what, f"{KEYS['nodes']}: fewer, or {KEYS['partition']}: choose another one")
    elif usable < num_nodes:
        what = f"{total - usable} of {total} nodes of {name} are down or drained; the job waits for them"
        yield Obstacle(what, f"ask the operator, or {KEYS['nodes']}: {usable}", is_for_ever=False)


def minutes(text: str) -> float:
    """A time as Slurm writes it (`90`, `30:00`, `2:00:00`, `1-00:00:00`, `infinite`); NaN where it is none."""
    if text in ("infinite", "UNLIMITED"):
        return math.inf
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return math.nan
    days, first, second, third = (int(part or 0) for part in found.groups())
    return 1440 * days + 60 * first + second + third / 60 if found[1] or found[4] else first + second / 60


def num_gpus(gres: str, kind: str = "") -> int:
    """GPUs of a type, or of any, in the GRES of a node."""
    return sum(int(number) for of_type, number in re.findall(_GPUS, gres) if kind in ("", of_type))


def gpu_type(gres: str) -> str:
    """The type of a node's GPUs; empty where GRES names none, or several."""
    kinds = {kind for kind, _ in re.findall(_GPUS, gres)}
    return str(kinds.pop()) if len(kinds) == 1 else ""


def _memory_mib(options: Mapping[str, str], cpus: int, gpus: int) -> float:
    for name, times in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", gpus)):
        if found := re.fullmatch(r"(\d+)([KMGT]?)B?", options.get(name, "").upper()):
            return int(found[1]) * times * 1024.0 ** ("KMGT".index(found[2] or "M") - 1)
    return 0


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0
