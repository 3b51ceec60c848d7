"""One global batch as an operation graph: who computes what, and who waits for whom.

Encoders run side by side and feed LLM stage 0. A data-parallel rank of the LLM waits only for the encoder ranks that
hold items of its own samples, and an encoder rank's backward only for the LLM ranks that consumed its items; a
rank with nothing to do for a microbatch passes over it. This is the routing the engine computes from the same
`StepPlan`. In an inline plan one chain of stages holds the layers of all modules: its nodes are the LLM's, and what a
node does with a microbatch is what each of the modules does with it. Ranks that share out parameters meet in every
microbatch. Gradient reduction and the optimizer come after
the graph (`Plan.sync_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dflop.records import LLM, ModulePlan, ModuleWork, Plan
from dflop.simulate.events import OpGraph
from dflop.simulate.pipeline_order import Phase, one_f_one_b

Floats = npt.NDArray[np.float64]

Node = tuple[str, int, int]
"""(module, stage, dp_rank)."""
PHASES: tuple[Phase, ...] = ("F", "B")
Durations = Mapping[Node, Sequence[tuple[float, float]]]
"""Per node and microbatch (forward_s, backward_s)."""
Delays = Mapping[Node, Sequence[tuple[float, float]]]
"""Per node and microbatch the seconds that its result travels: (forward to the next stage, backward to the one
before)."""


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
    """Nodes in the order of the plan's modules (inline: the LLM alone), then stage, then data-parallel rank."""
    return tuple(
        (m.module, stage, dp_rank)
        for m in plan.pipes
        for stage in range(m.parallel.pp)
        for dp_rank in range(m.parallel.dp)
    )


def num_stages_after(plan: Plan, module: str, stage: int) -> int:
    """Stages between this one and the loss: what decides its 1F1B warm-up."""
    own = plan.module(module).parallel.pp - 1 - stage
    return own if module == LLM else own + plan.module(LLM).parallel.pp


def meeting(module: ModulePlan, stage: int) -> tuple[int, float, float]:
    """(neighbouring replicas that share out parameters, 1: none; seconds to gather weights, to share out gradients)."""
    gather_s, scatter_s = module.gather_s, module.scatter_s
    return module.parameter_shards, gather_s[stage] if gather_s else 0.0, scatter_s[stage] if scatter_s else 0.0


def meeting_ranks(plan: Plan, module: str) -> int:
    """Neighbouring ranks of a pipe's stages that wait for one another in every microbatch; 1: none do."""
    return max(m.parameter_shards for m in (plan.modules if plan.is_inline else [plan.module(module)]))


def together(plan: Plan, module: str, stage: int, forward_s: Floats, backward_s: Floats) -> tuple[Floats, Floats]:
    """Seconds `[..., dp]` of a module's microbatches as its replicas see them.

    Those that share out parameters gather weights for each pass layer by layer, so all of a group take as long as the
    slowest, and no less than their messages; who has nothing to do runs along.
    """
    group, gather_s, scatter_s = meeting(plan.module(module), stage)
    if group == 1:
        return forward_s, backward_s
    is_run: Floats = np.sign(np.max(forward_s + backward_s, axis=-1, keepdims=True))
    forward: Floats = is_run * np.maximum(slowest(forward_s, group), gather_s)
    backward: Floats = is_run * np.maximum(slowest(backward_s, group), gather_s + scatter_s)
    return forward, backward


def slowest(seconds: Floats, group: int) -> Floats:
    """Seconds `[..., dp]` of which all of a group of neighbours have the longest."""
    found: Floats = np.maximum.reduceat(seconds, np.arange(0, seconds.shape[-1], group), axis=-1)
    return np.repeat(found, group, axis=-1)[..., : seconds.shape[-1]]


def op_id(num_microbatches: int, node: int, microbatch: int, phase: Phase) -> int:
    """Number of an operation in the graph of `step_graph`."""
    return 2 * (node * num_microbatches + microbatch) + (phase == "B")


def step_graph(plan: Plan, work: tuple[ModuleWork, ...], durations: Durations, delays: Delays | None = None) -> OpGraph:
    """Operation graph of one step under the 1F1B order of every node.

    Args:
        plan: Layout; its `num_microbatches` is the length of every `durations` entry.
        work: Owners of every module of the plan.
        durations: Per module, inline plans too; of ranks that meet, alone or already `together`.
        delays: Of `step_nodes(plan)`; None: nothing travels.
    """
    m, nodes = plan.num_microbatches, step_nodes(plan)
    index = {node: i for i, node in enumerate(nodes)}
    owner = {w.module: w.owner for w in work}
    links: Links = {} if plan.is_inline else _links(work)
    seconds: list[float] = [0.0] * (2 * m * len(nodes))
    travel: list[float] = [0.0] * (2 * m * len(nodes)) if delays else []
    depends: list[tuple[int, ...]] = [()] * (2 * m * len(nodes))
    for node, (module, stage, rank) in enumerate(nodes):
        parts = [p.module for p in plan.modules] if plan.is_inline else [module]
        group = meeting_ranks(plan, module)
        for k in range(m):
            forward, backward = op_id(m, node, k, "F"), op_id(m, node, k, "B")
            work_s = [durations[part, stage, rank][k] for part in parts if owner[part][k][rank] or group > 1]
            if work_s:
                seconds[forward], seconds[backward] = (sum(column) for column in zip(*work_s, strict=True))
            if delays:
                travel[forward], travel[backward] = delays[module, stage, rank][k]
            if owner[module][k][rank]:
                before, after = _neighbours(plan, links, module, stage, rank, k)
                depends[forward] = tuple(op_id(m, index[n], k, "F") for n in before)
                depends[backward] = tuple(op_id(m, index[n], k, "B") for n in after)
    orders = [one_f_one_b(m, num_stages_after(plan, module, stage)) for module, stage, _ in nodes]
    node_ops = tuple(tuple(op_id(m, node, a.microbatch, a.phase) for a in order) for node, order in enumerate(orders))
    for node, (module, _, rank) in enumerate(nodes):
        group = meeting_ranks(plan, module)
        if group > 1 and rank % group == 0:
            _meet(node_ops[node : node + min(group, plan.module(module).parallel.dp - rank)], seconds, depends)
    return OpGraph(node_ops, tuple(seconds), tuple(depends), tuple(travel))


def _meet(node_ops: Sequence[Sequence[int]], seconds: list[float], depends: list[tuple[int, ...]]) -> None:
    """All of these nodes begin when the last is ready, and take as long as the slowest."""
    for ops in zip(*node_ops, strict=True):
        longest_s = max(seconds[op] for op in ops)
        waits = tuple(dict.fromkeys(dep for op in ops for dep in depends[op]))
        for op in ops:
            seconds[op], depends[op] = longest_s, waits


Links = Mapping[tuple[str, int, int], tuple[Node, ...]]
"""Per (module, microbatch, dp_rank) the (module, 0, dp_rank) it exchanges rows with across the encoder-LLM edge."""


def _links(work: tuple[ModuleWork, ...]) -> Links:
    llm = next(w for w in work if w.module == LLM)
    home = {
        llm.item_sample[i]: (k, rank)
        for k, ranks in enumerate(llm.owner)
        for rank, items in enumerate(ranks)
        for i in items
    }
    found: dict[tuple[str, int, int], dict[Node, None]] = {}
    for encoder in (w for w in work if w.module != LLM):
        for k, ranks in enumerate(encoder.owner):
            for rank, items in enumerate(ranks):
                for i in items:
                    llm_k, llm_rank = home[encoder.item_sample[i]]
                    assert llm_k == k, f"{encoder.module} item {i} in microbatch {k}, its sample in {llm_k}"
                    found.setdefault((encoder.module, k, rank), {})[LLM, 0, llm_rank] = None
                    found.setdefault((LLM, k, llm_rank), {})[encoder.module, 0, rank] = None
    return {key: tuple(peers) for key, peers in found.items()}


def _neighbours(
    plan: Plan, links: Links, module: str, stage: int, rank: int, microbatch: int
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Nodes whose forward this one needs, and nodes whose backward it needs."""
    last = plan.module(module).parallel.pp - 1
    peers = links.get((module, microbatch, rank), ())
    before: tuple[Node, ...] = ((module, stage - 1, rank),) if stage > 0 else ()
    after: tuple[Node, ...] = ((module, stage + 1, rank),) if stage < last else ()
    if module == LLM and stage == 0 and not plan.is_inline:
        before = tuple((name, plan.module(name).parallel.pp - 1, peer) for name, _, peer in peers)
    if module != LLM and stage == last:
        after = peers
    return before, after
