"""The cluster that a plan without a run is for: the configured one, or GPUs that are only on a data sheet.

A configuration of this machine says nothing about nodes of a device that somebody names: those have the data sheet's
number of GPUs, and processes without a GPU nothing of its memory. What is set by hand holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflop.config import Config
from dflop.cost.devices import find_device
from dflop.errors import ConfigError
from dflop.records import ClusterSpec
from dflop.run.messages import Say
from dflop.steps.planning import batch_note
from dflop.units import num_bytes

_NODE, _MEMORY = "cluster.num_processes_per_node", "cluster.memory_per_process_gib"


def planned_cluster(
    config: Config, say: Say, *, device: str = "", gpus: int | None = None, gpus_per_node: int | None = None,
    overrides: Sequence[str] = (),
) -> ClusterSpec:  # fmt: skip
    """The cluster to plan for; without a data sheet's `device` that of the configuration, with as many `gpus`.

    `overrides` are the `key=value` given by hand that the configuration holds already.

    Raises:
        ConfigError: the GPUs do not make up whole nodes, or none; an unknown device.
    """
    configured = config.cluster.spec()
    for option, number in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if number is not None and number < 1:
            raise ConfigError(f"cannot plan for {number} GPUs", where=option, hint="1 or more")
    by_hand = {text.partition("=")[0].strip() for text in overrides}
    sheet = find_device(device) if device else None
    is_site = configured.backend == "slurm" and configured.device == "cuda"
    total, usual = gpus or configured.num_processes, configured.num_processes_per_node
    if sheet is not None and not is_site and _NODE not in by_hand:
        usual = sheet.num_per_node
    each = min(gpus_per_node or usual, total)
    if total % each:
        hint = f"a multiple of {each}, or other nodes: --gpus-per-node"
        raise ConfigError(f"{total} GPUs are not whole nodes of {each}", where="--gpus", hint=hint)
    found = replace(configured, num_nodes=total // each, num_processes_per_node=each)
    if sheet is not None:
        memory_bytes = sheet.memory_bytes
        if configured.device == "cuda" or _MEMORY in by_hand:
            memory_bytes = min(memory_bytes, configured.memory_per_process_bytes)
        if memory_bytes < 0.9 * sheet.memory_bytes:
            say(f"{_MEMORY} leaves {num_bytes(memory_bytes)} of the {num_bytes(sheet.memory_bytes)} that a GPU has")
        found = replace(found, device="cuda", memory_per_process_bytes=memory_bytes)
    if note := batch_note(config, total):
        say(note)
    return found
