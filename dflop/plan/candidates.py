"""The space of one module: every (tp, pp, dp) that could run, with its best layer split and its ways to save memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.cost.model import CostModel
from dflop.errors import CostError, InfeasiblePlanError
from dflop.plan.grid_choice import GridChoice
from dflop.plan.space import Problem
from dflop.records import LLM, ModuleSpec, ParallelSpec
from dflop.schedule.items import Ints

Bools = npt.NDArray[np.bool_]
NUM_SHARD_CHOICES = 3
"""Ways to share out parameters: not, over a node, over all replicas."""
MAX_PP = 16
"""Deepest pipeline that is tried, of one module or an inline chain: by then bubbles have outgrown the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """C ways to lay out one module, as arrays `[C]`; indexing gives a `GridChoice`."""

    spec: ModuleSpec
    tp: Ints
    pp: Ints
    dp: Ints
    last: Ints
    """Layers of the last stage; the others share the rest evenly."""
    recompute: Bools
    shard_optimizer: Bools
    shards: Ints
    """Replicas that share out parameters; 1: none."""

    def __len__(self) -> int:
        return len(self.tp)

    def __getitem__(self, index: int) -> GridChoice:
        layers = spread_layers(self.spec.num_layers, int(self.pp[index]), int(self.last[index]))
        return GridChoice.of(
            ParallelSpec(int(self.tp[index]), int(self.pp[index]), int(self.dp[index])),
            {self.spec.module: layers},
            recompute=bool(self.recompute[index]),
            shard_optimizer=bool(self.shard_optimizer[index]),
            parameter_shards=int(self.shards[index]),
        )

    def select(self, which: Ints | Bools) -> Candidates:
        """Those at indices or under a mask, in that order."""
        arrays = (self.tp, self.pp, self.dp, self.last, self.recompute, self.shard_optimizer, self.shards)
        return Candidates(self.spec, *(a[which] for a in arrays))  # type: ignore[arg-type]  # integers and booleans in one

    @property
    def num_processes(self) -> Ints:
        return self.tp * self.pp * self.dp

    @property
    def widest(self) -> Ints:
        """Most layers of any stage but the last; 0 where there is no other."""
        others = self.pp - 1
        return np.where(others > 0, -(-(self.spec.num_layers - self.last) // np.maximum(others, 1)), 0)

    @property
    def layers(self) -> Ints:
        """`[C, deepest pp]`, zeros behind the last stage."""
        stage = np.arange(int(self.pp.max(initial=1)))
        others = np.maximum(self.pp - 1, 1)[:, np.newaxis]
        size, extra = np.divmod((self.spec.num_layers - self.last)[:, np.newaxis], others)
        before_last = size + (stage >= others - extra)
        depth = self.pp[:, np.newaxis]
        return np.where(stage < depth - 1, before_last, np.where(stage == depth - 1, self.last[:, np.newaxis], 0))

    def groups(self) -> list[tuple[int, bool, Ints]]:
        """(tp, recompute, indices) of the candidates that share a cost table."""
        table = 2 * self.tp + self.recompute
        return [(int(t) // 2, bool(t % 2), np.flatnonzero(table == t)) for t in np.unique(table)]

    @property
    def content(self) -> Ints:
        """`[C, 6]`: what tells candidates apart; breaks ties, so that their order never matters."""
        columns = [self.tp, self.pp, self.dp, self.shards, self.recompute, self.shard_optimizer]
        return np.stack(columns, axis=1).astype(np.int64)


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


def module_candidates(problem: Problem, spec: ModuleSpec, num_microbatches: int) -> Candidates:
    """Every layout of `spec` under a number of microbatches, memory not considered.

    Every process may be taken but one for each other module. With more than one replica the optimizer's states are
    shared out where that is allowed: it saves memory and costs no time, so nothing else needs to be looked at.

    Raises:
        CostError: no cost table for the module at any tp.
        InfeasiblePlanError: no tp that the module, its costs and the cluster allow.
    """
    most = problem.cluster.num_processes - len(problem.specs) + 1
    max_dp = problem.global_batch_size // (num_microbatches if spec.module == LLM else 1)
    columns: list[Ints] = [np.zeros((6, 0), dtype=np.int64)]
    for tp in problem.tps(spec):
        for way in recompute_ways(problem, spec.module, tp):
            splits = _LayerSplits.at(problem, spec, tp, recompute=way)
            for pp in range(1, min(spec.max_pp, spec.num_layers, most // tp, MAX_PP) + 1):
                dp = np.array(problem.dps(min(max_dp, most // (tp * pp))), dtype=np.int64)
                last = splits.last_stage(pp, num_microbatches * dp)
                for shards in shard_choices(problem, tp, dp):
                    of_kind = np.stack(np.broadcast_arrays(tp, pp, dp, way, last, shards))
                    columns.append(of_kind[:, shards > 0])
    found_tp, found_pp, found_dp, ways, last, shards = np.concatenate(columns, axis=1)
    shares = (shards > 1) | problem.space.shard_optimizer & (found_dp > 1)
    return Candidates(spec, found_tp, found_pp, found_dp, last, ways > 0, shares, shards)


def shard_choices(problem: Problem, tp: int, replicas: Ints) -> list[Ints]:
    """Per way to share out parameters `[C]`, replicas of a group: none do, those of a node, all; 0: not possible.

    Only whole nodes form groups, and only where there are several: else the groups are all replicas or none.
    """
    wanted, each = problem.space.shard_parameters, max(1, problem.cluster.num_processes_per_node // tp)
    none = np.where((False in wanted) | (replicas == 1), 1, 0)
    node = np.where((True in wanted) & (each > 1) & (replicas > each) & (replicas % each == 0), each, 0)
    return [none, node, np.where((True in wanted) & (replicas > 1), replicas, 0)]


def recompute_ways(problem: Problem, module: str, tp: int) -> list[bool]:
    """Without and with recomputation, as far as the space allows and costs are known.

    Recomputing needs the plain costs, too: one layer at a time keeps all of its activations.
    """
    ways = sorted(set(problem.space.recompute))
    if True in ways and not (has_table(problem.cost, module, tp, True) and has_table(problem.cost, module, tp, False)):
        ways.remove(True)
    return ways or [False]


def has_table(cost: CostModel, module: str, tp: int, recompute: bool) -> bool:
    """Whether costs of that way of running the module are known or can be derived."""
    try:
        cost.table(module, tp, recompute)
    except CostError:
        return False
    return True


@functools.lru_cache(maxsize=65536)
def best_last_stage(num_layers: int, pp: int, layer_s: float, edge_s: float) -> int:
    """Layers of the last stage, at least one each, so that the slowest is fastest when the last also runs the edge.

    Layers are alike, so trying every depth of the last stage is exact. Of equally fast splits the most even one wins.
    """
    if pp == 1:
        return num_layers

    def slowest_s(last: int) -> tuple[float, int]:
        others = -(-(num_layers - last) // (pp - 1))
        return max(others * layer_s, last * layer_s + edge_s), max(others, last)

    return min(range(num_layers - pp + 1, 0, -1), key=slowest_s)


def spread_layers(num_layers: int, pp: int, last: int) -> tuple[int, ...]:
    """`last` layers on the last of `pp` stages, the rest evenly on the others, odd ones on the later of them."""
    if pp == 1:
        return (num_layers,)
    size, extra = divmod(num_layers - last, pp - 1)
    return (*(size + (stage >= pp - 1 - extra) for stage in range(pp - 1)), last)


def nearest_power(num_buckets: npt.ArrayLike) -> Ints:
    """Exponents of the powers of two nearest to numbers of buckets.

    Layers are split at the typical load of so many buckets: a split hangs on how layers compare with the edge, which
    hardly changes within a factor of 1.4, and few distinct loads make it cheap.
    """
    return np.rint(np.log2(num_buckets)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _LayerSplits:
    """How a module's layers are split at the typical load of 1, 2, 4, ... buckets."""

    num_layers: int
    layer_s: tuple[float, ...]
    edge_s: tuple[float, ...]

    @classmethod
    def at(cls, problem: Problem, spec: ModuleSpec, tp: int, *, recompute: bool) -> _LayerSplits:
        most_buckets = problem.global_batch_size * problem.cluster.num_processes
        loads = problem.loads[spec.module].typical(2 ** np.arange(int(nearest_power(most_buckets)) + 1))
        seconds = layer_and_edge_seconds(problem.cost, spec.module, loads, tp=tp, recompute=recompute)
        return cls(spec.num_layers, *(tuple(part.tolist()) for part in seconds))

    def last_stage(self, pp: int, num_buckets: Ints) -> Ints:
        """Layers of the last of `pp` stages for each number of buckets."""
        best = [best_last_stage(self.num_layers, pp, *pair) for pair in zip(self.layer_s, self.edge_s, strict=True)]
        return np.array(best, dtype=np.int64)[nearest_power(num_buckets)]


def layer_and_edge_seconds(
    cost: CostModel, module: str, load: npt.NDArray[np.float64], *, tp: int, recompute: bool, cp: int = 1
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(one layer, the edge), forward and backward, on loads `[3, ...]`; seconds of a stage are linear in its layers."""
    layer = cost.module_seconds(module, *load, num_layers=1, edge=False, tp=tp, cp=cp, recompute=recompute)
    edge = cost.module_seconds(module, *load, num_layers=0, edge=True, tp=tp, cp=cp, recompute=recompute)
    return layer[0] + layer[1], edge[0] + edge[1]
