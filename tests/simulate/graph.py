"""The obvious simulator: a step as a graph of operations, walked in Python. The compiled one is held equal to it.

Encoders run side by side and feed LLM stage 0. A data-parallel rank of the LLM waits only for the encoder ranks that
hold items of its own samples, and an encoder rank's backward only for the LLM ranks that consumed its items; a
rank with nothing to do for a microbatch passes over it. Ranks that share out parameters meet in every microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflop.records import LLM, ModuleWork, Plan
from dflop.simulate.order import Phase, actions, num_stages_after
from dflop.simulate.step import Node, meeting_ranks, step_nodes

Durations = Mapping[Node, Sequence[tuple[float, float]]]
"""Per node and microbatch (forward_s, backward_s)."""
Delays = Mapping[Node, Sequence[tuple[float, float]]]
"""Per node and microbatch the seconds that its result travels: (forward to the next stage, backward to the one
before)."""


@dataclass(frozen=True, slots=True)
class OpGraph:
    """Operations, numbered from 0, and what each waits for."""

    node_ops: tuple[tuple[int, ...], ...]
    """Per node its operations in the order they run; every operation is on exactly one node."""
    durations_s: tuple[float, ...]
    depends_on: tuple[tuple[int, ...], ...]
    """Per operation those of other nodes it waits for; order within a node is implied."""
    delays_s: tuple[float, ...] = ()
    """Per operation the time its result travels: those that wait for it start no earlier; empty: none."""

    def arrival_s(self, end: Sequence[float], op: int) -> float:
        """When the result of an operation that ended is where it is needed."""
        return end[op] + self.delays_s[op] if self.delays_s else end[op]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every operation."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    makespan_s: float


def simulate(graph: OpGraph) -> Timeline:
    """Timeline when every node computes at full speed."""
    start, end = [0.0] * len(graph.durations_s), [-1.0] * len(graph.durations_s)
    position, free = [0] * len(graph.node_ops), [0.0] * len(graph.node_ops)
    parked: dict[int, list[int]] = {}
    runnable = list(range(len(graph.node_ops)))
    while runnable:
        node = runnable.pop()
        ops, at = graph.node_ops[node], free[node]
        for i in range(position[node], len(ops)):
            op = ops[i]
            blocker = next((dep for dep in graph.depends_on[op] if end[dep] < 0), None)
            if blocker is not None:
                parked.setdefault(blocker, []).append(node)
                position[node] = i
                break
            for dep in graph.depends_on[op]:
                at = max(at, graph.arrival_s(end, dep))
            start[op] = at
            at += graph.durations_s[op]
            end[op] = at
            runnable += parked.pop(op, ())
        else:
            position[node] = len(ops)
        free[node] = at
    assert position == [len(ops) for ops in graph.node_ops], "operations wait for one another in a circle"
    return Timeline(tuple(start), tuple(end), max(end, default=0.0))


def op_id(num_microbatches: int, node: int, microbatch: int, phase: Phase) -> int:
    """Number of an operation in the graph of `step_graph`."""
    return 2 * (node * num_microbatches + microbatch) + (phase == "B")


def step_graph(
    plan: Plan, work: tuple[ModuleWork, ...], durations: Durations, delays: Delays | None = None
) -> OpGraph:  # fmt: skip
    """Operation graph of one step under the order of every node.

    Args:
        plan: Layout; its `num_microbatches` is the length of every `durations` entry.
        work: Owners of every module of the plan.
        durations: Per module, inline plans too; of ranks that meet, alone or already `together`.
        delays: Of `step_nodes(plan)`; None: nothing travels.
    """
    m, nodes = plan.num_microbatches, step_nodes(plan)
    index = {node: i for i, node in enumerate(nodes)}
    owner = {w.module: w.owner for w in work}
    links: Links = _links(work, [e.module for e in plan.apart])
    seconds: list[float] = [0.0] * (2 * m * len(nodes))
    travel: list[float] = [0.0] * (2 * m * len(nodes)) if delays else []
    depends: list[tuple[int, ...]] = [()] * (2 * m * len(nodes))
    for node, (module, stage, rank) in enumerate(nodes):
        parts = [p.module for p in plan.grid_of(module)]
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
    orders = [actions(m, num_stages_after(plan, module, stage)) for module, stage, _ in nodes]
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


def _links(work: tuple[ModuleWork, ...], apart: Sequence[str]) -> Links:
    llm = next(w for w in work if w.module == LLM)
    home = {
        llm.item_sample[i]: (k, rank)
        for k, ranks in enumerate(llm.owner)
        for rank, items in enumerate(ranks)
        for i in items
    }
    found: dict[tuple[str, int, int], dict[Node, None]] = {}
    for encoder in (w for w in work if w.module in apart):
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
    if module == LLM and stage == 0:
        before = tuple((name, plan.module(name).parallel.pp - 1, peer) for name, _, peer in peers)
    if module != LLM and stage == last:
        after = peers
    return before, after
