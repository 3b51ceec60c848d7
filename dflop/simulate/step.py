"""What the simulator and its callers share about a step: its nodes, groups that synchronize, cores in common.

Stages of a grid may hold layers of several modules: its nodes bear the name of the last, the LLM if it is there, and
what a node does with a microbatch is what each of the modules does with it. Ranks that share out parameters meet in
every microbatch, and most of their messages are exposed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflop.records import ModulePlan, Plan

Floats = npt.NDArray[np.float64]

Node = tuple[str, int, int]
"""(module, stage, dp_rank)."""
EXPOSED_FRAC = 0.808
"""Share of FSDP2's gather and scatter seconds that computing does not hide: fitted to 88 published trainings
(`python -m tests.bench.published` prints the fit at a data sheet's rate, 1.01, of which links reach 0.8)."""


def on_shared_cores(start_s: Floats, end_s: Floats, num_processes: npt.ArrayLike, cores: int) -> tuple[Floats, Floats]:
    """The same operations where processes share cores: while n of them compute, time takes n / cores times as long.

    That is processor sharing, for all that compute at a time are slowed down alike; messages are, too.

    Args:
        start_s: `[...]`, of every operation with a core for each process.
        end_s: `[...]`.
        num_processes: `[...]`, that compute it together, as tensor-parallel ranks do.
        cores: That all of them have.
    """
    num = np.broadcast_to(num_processes, start_s.shape).ravel()
    at = np.concatenate([start_s.ravel(), end_s.ravel()])
    order = np.argsort(at, kind="stable")
    computing = np.cumsum(np.concatenate([num, -num])[order])
    passed = np.diff(at[order], prepend=0.0) * np.maximum(1.0, np.append(0, computing[:-1]) / cores)
    clock = np.cumsum(passed)
    return np.interp(start_s, at[order], clock), np.interp(end_s, at[order], clock)


def step_nodes(plan: Plan) -> tuple[Node, ...]:
    """Nodes in the order of the plan's pipes, then stage, then data-parallel rank."""
    return tuple(
        (m.module, stage, dp_rank)
        for m in plan.pipes
        for stage in range(m.parallel.pp)
        for dp_rank in range(m.parallel.dp)
    )


def meeting(module: ModulePlan, stage: int) -> tuple[int, float, float]:
    """(neighbours that wait for one another, 1: none; seconds to gather weights, to share out gradients).

    Neighbours are replicas, or the groups of them that share samples: a group is one node.
    """
    gather_s, scatter_s = module.gather_s, module.scatter_s
    return _neighbours(module), gather_s[stage] if gather_s else 0.0, scatter_s[stage] if scatter_s else 0.0


def meeting_ranks(plan: Plan, module: str) -> int:
    """Neighbouring ranks of a pipe's stages that wait for one another in every microbatch; 1: none do."""
    return max(_neighbours(m) for m in plan.grid_of(module))


def _neighbours(module: ModulePlan) -> int:
    return max(1, module.num_meeting // module.parallel.cp)


def together(plan: Plan, module: str, stage: int, forward_s: Floats, backward_s: Floats) -> tuple[Floats, Floats]:
    """Seconds `[..., dp]` of a module's microbatches as its replicas see them.

    Those that share out parameters gather weights for each pass layer by layer, those that share experts send tokens
    there, so all of a group take as long as the slowest, and what is exposed of their messages; who has nothing to do
    runs along.
    """
    group, gather_s, scatter_s = meeting(plan.module(module), stage)
    if group == 1 and not gather_s:
        return forward_s, backward_s
    is_run: Floats = np.sign(np.max(forward_s + backward_s, axis=-1, keepdims=True))
    forward: Floats = is_run * with_messages(slowest(forward_s, group), gather_s)
    backward: Floats = is_run * with_messages(slowest(backward_s, group), gather_s + scatter_s)
    return forward, backward


def with_messages(compute_s: Floats, message_s: npt.ArrayLike) -> Floats:
    """Seconds of computing and of gathers and scatters next to it: never less than the messages alone."""
    message_s = np.asarray(message_s)
    found: Floats = np.maximum(compute_s + EXPOSED_FRAC * message_s, message_s)
    return found


def without_messages(seconds: Floats, message_s: Floats) -> Floats:
    """What `with_messages` was given; 0 where it took no longer than the messages and says nothing of computing."""
    found: Floats = np.where(seconds > message_s, seconds - EXPOSED_FRAC * message_s, 0.0)
    return found


def messages_s(plan: Plan, node: Node) -> float:
    """Seconds of gathers and scatters of all that a node's stage holds, in both passes of a microbatch."""
    found = (meeting(m, node[1]) for m in plan.grid_of(node[0]))
    return sum(2 * gather_s + scatter_s for _, gather_s, scatter_s in found)


def slowest(seconds: Floats, group: int) -> Floats:
    """Seconds `[..., dp]` of which all of a group of neighbours have the longest."""
    if group == 1:
        return seconds
    found: Floats = np.maximum.reduceat(seconds, np.arange(0, seconds.shape[-1], group), axis=-1)
    return np.repeat(found, group, axis=-1)[..., : seconds.shape[-1]]
