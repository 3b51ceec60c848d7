"""A plan as a shell script that starts this project's training with torchrun, one call per node.

For clusters without Slurm, or with a launcher of their own that runs one command per node. Ranks fill node after node;
the last node may run fewer processes than the others. The processes learn their seats from the plan in the run
directory, so the table of ranks in the script is for people.
"""

from __future__ import annotations

import re

from dflop import units
from dflop.errors import ConfigError
from dflop.parallel.topology import Seat, seats
from dflop.records import ClusterSpec, Plan

HEADER = ("rank", "node", "local", "stage", "dp_rank", "cp_rank", "tp_rank", "layers")
SCRIPT = """#!/bin/bash
{comments}

set -euo pipefail
usage="usage: [NODE_RANK=N MASTER_ADDR=HOST] bash $0 RUN_DIR [train|compare]"
run=${{1:?$usage}}
mode=${{2:-train}}
processes_of_node=({processes_of_node})
num_nodes=${{#processes_of_node[@]}}
if ((num_nodes == 1)); then
    NODE_RANK=0 MASTER_ADDR=${{MASTER_ADDR:-127.0.0.1}}
fi
NODE_RANK=${{NODE_RANK:-${{SLURM_NODEID:?$usage}}}}
# More nodes than the plan needs may have been started.
((NODE_RANK < num_nodes)) || exit 0

{exports}
# Modules do not come from the folder this is called in.
export PYTHONSAFEPATH=1

exec torchrun --nnodes="$num_nodes" --node-rank="$NODE_RANK" --nproc-per-node="${{processes_of_node[NODE_RANK]}}" \\
    --master-addr="${{MASTER_ADDR:?$usage}}" --master-port="${{MASTER_PORT:-29500}}" \\
    -m dflop.jobs.train "$run" "$mode"
"""


def emit_torchrun(plan: Plan, cluster: ClusterSpec) -> str:
    """The script.

    Args:
        plan: Any layout.
        cluster: Gives the processes of a node, the cores each may use, and the device.

    Raises:
        ConfigError: the plan has more processes than the cluster.
    """
    if plan.num_processes > cluster.num_processes:
        raise ConfigError(
            f"the plan has {plan.num_processes} processes, cluster `{cluster.name}` has {cluster.num_processes}",
            where="--emit torchrun",
            hint="emit for the cluster the plan was made for",
        )
    return SCRIPT.format(
        comments="\n".join(f"# {line}".rstrip() for line in (*_about(plan), *_table(plan, cluster))),
        processes_of_node=" ".join(map(str, processes_of_nodes(plan.num_processes, cluster.num_processes_per_node))),
        exports="\n".join(f"export {name}=${{{name}:-{value}}}" for name, value in _environment(cluster).items()),
    )


def processes_of_nodes(num_processes: int, most_per_node: int) -> list[int]:
    """Processes of each node when ranks fill node after node."""
    full, rest = divmod(num_processes, most_per_node)
    return [most_per_node] * full + [rest] * (rest > 0)


def _about(plan: Plan) -> list[str]:
    return [
        f"Plan {_one_line(plan.plan_id)} of run {_one_line(plan.run_id)}: {plan.num_processes} processes, "
        f"{plan.num_microbatches} microbatches of a global batch of {plan.global_batch_size} samples.",
        f"Simulated step: {units.seconds(plan.predicted_step_s)}, in arrival order "
        f"{units.seconds(plan.baseline_step_s)}.",
        "",
        "Run this on every node, where dflop is installed. RUN_DIR is the run directory with this plan, on a file",
        "system that all nodes see.",
        "NODE_RANK numbers the nodes from 0, MASTER_ADDR is node 0; one node needs neither.",
        "",
    ]


def _table(plan: Plan, cluster: ClusterSpec) -> list[str]:
    rows = [HEADER, *(_row(seat, cluster.num_processes_per_node) for seat in seats(plan))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER) - 1)]
    return ["  ".join([*(t.rjust(w) for t, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def _row(seat: Seat, processes_per_node: int) -> tuple[str, ...]:
    node, local = divmod(seat.rank, processes_per_node)
    layers = " ".join(f"{part.module}[{part.layers[0]}:{part.layers[1]}]" for part in seat.parts)
    return (*map(str, (seat.rank, node, local, seat.stage, seat.dp_rank, seat.cp_rank, seat.tp_rank)), layers)


def _environment(cluster: ClusterSpec) -> dict[str, int]:
    if cluster.device == "cuda":
        # Beside a GPU the cores decode media.
        return {"OMP_NUM_THREADS": max(1, cluster.num_cores_per_node // cluster.num_processes_per_node)}
    # Without one a process computes on one thread and keeps its memory between steps instead of returning it.
    return {"OMP_NUM_THREADS": 1, "MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 4 << 30}


def _one_line(text: str) -> str:
    """Names come from configurations; a line break in one would end the comment."""
    return re.sub(r"\s+", " ", text)
