"""What a grid may be: depths, ways to share out parameters and to recompute, and what a layer takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop.cost.model import CostModel
from dflop.errors import CostError, InfeasiblePlanError
from dflop.plan.space import Problem
from dflop.records import RunMode
from dflop.schedule.items import Ints

Bools = npt.NDArray[np.bool_]
NUM_SHARD_CHOICES = 3
"""Ways to share out parameters: not, over a node, over all replicas."""
MAX_PP = 16
"""Deepest pipeline that is tried, of one module or of all in one chain: by then bubbles have outgrown the rest."""


def check_processes(modules: Sequence[str], num_processes: int) -> None:
    """Fail fast, before any profiling, when the split layout cannot fit.

    Raises:
        InfeasiblePlanError: fewer processes than modules.
    """
    if len(modules) > num_processes:
        raise InfeasiblePlanError(
            f"{len(modules)} modules with dedicated ranks need at least {len(modules)} processes; "
            f"the cluster has {num_processes}",
            where=f"modules: {', '.join(modules)}",
            hint=f"add {len(modules) - num_processes} process(es): num_nodes or num_processes_per_node",
        )


def shard_choices(problem: Problem, mode: RunMode, dp: Ints) -> list[Ints]:
    """Per way to share out parameters `[C]`, replicas of a group: none do, those of a node, all; 0: not possible.

    Only whole nodes form groups, and only where there are several: else the groups are all replicas or none. Groups,
    and all replicas, hold all experts equally often.
    """
    replicas, ep = dp * mode.cp, mode.ep
    wanted, each = problem.space.shard_parameters, max(1, problem.cluster.num_processes_per_node // mode.tp)
    none = np.where((False in wanted) | (replicas == 1), 1, 0)
    node = np.where((True in wanted) & (each > 1) & (replicas > each) & (replicas % each == 0), each, 0)
    found = [none, node, np.where((True in wanted) & (replicas > 1), replicas, 0)]
    if ep == 1:
        return found
    none = np.where(replicas * mode.tp % ep == 0, none, 0)
    return [none, *(np.where(of % ep == 0, of, 0) for of in found[1:])]


def recompute_ways(problem: Problem, module: str, tp: int) -> list[bool]:
    """Without and with recomputation, as far as the space allows and costs are known.

    Recomputing needs the plain costs, too: one layer at a time keeps all of its activations.
    """
    ways = sorted(set(problem.space.recompute))
    if True in ways and not (all(has_table(problem.cost, module, RunMode(tp, recompute=way)) for way in (True, False))):
        ways.remove(True)
    return ways or [False]


def has_table(cost: CostModel, module: str, mode: RunMode) -> bool:
    """Whether costs of that way of running the module are known or can be derived."""
    try:
        cost.table(module, mode)
    except CostError:
        return False
    return True


def far_apart(counts: Sequence[int], ratio: float) -> list[int]:
    """The first of sorted counts and those that differ at least by a ratio from the one kept before; the last, too."""
    kept = list(counts[:1])
    for m in counts[1:]:
        if max(m, kept[-1]) >= ratio * min(m, kept[-1]) or m == counts[-1]:
            kept.append(m)
    return kept


def nearest_power(num_buckets: npt.ArrayLike) -> Ints:
    """Exponents of the powers of two nearest to numbers of buckets.

    Layers are split at the typical load of so many buckets: a split hangs on how layers compare with the edge, which
    hardly changes within a factor of 1.4, and few distinct loads make it cheap.
    """
    return np.rint(np.log2(num_buckets)).astype(np.int64)


def layer_and_edge_seconds(
    cost: CostModel, module: str, load: npt.NDArray[np.float64], mode: RunMode
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(one layer, the edge), forward and backward, on loads `[3, ...]`; seconds of a stage are linear in its layers."""
    layer = cost.module_seconds(module, load, mode, num_layers=1, edge=False)
    edge = cost.module_seconds(module, load, mode, num_layers=0, edge=True)
    return layer[0] + layer[1], edge[0] + edge[1]
