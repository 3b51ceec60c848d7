"""From a plan and the shapes of one global batch to the step plan that ends soonest under the simulator.

Three candidates: the arrival order, the balanced packing, and the balanced packing in a better order. The best one is
returned, so that scheduling never loses against not scheduling; a balanced candidate always keeps the token cap, and
an arrival order that breaks it does not stand for election.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import CostModel
from dflop.errors import ConfigError, did_you_mean
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.schedule.arrival import arrival_owners, items_in_slots
from dflop.schedule.items import ModuleItems, Owner, item_seconds, module_items, owner_loads, stage_durations
from dflop.schedule.order import order_slots
from dflop.schedule.pack import pack, token_cap
from dflop.schedule.split import split_lpt
from dflop.simulate.events import OpGraph
from dflop.simulate.step import Node, op_id, run_graph, step_graph, step_nodes, with_slot_order

POLICIES = ("balanced", "arrival")


def schedule_step(
    *,
    run_id: str,
    step: int,
    plan: Plan,
    batch: Sequence[SampleShape],
    cost: CostModel,
    max_concurrency: int | None = None,
    policy: str = "balanced",
    max_evals: int = 20_000,
    max_simulations: int = 48,
) -> StepPlan:
    """Step plan of one global batch; a pure function of its arguments.

    Args:
        run_id: Copied into the step plan.
        step: Copied into the step plan.
        plan: Layout and number of microbatches.
        batch: Samples in arrival order; may be shorter than the plan's global batch (end of an epoch).
        cost: Predicts seconds, corrections included; extrapolates if it must, for no batch may stop training.
        max_concurrency: Processes that can compute at once, when fewer than the plan has.
        policy: `balanced` returns the best candidate, `arrival` the data-blind order.
        max_evals: Budget of the packing search, in evaluated moves.
        max_simulations: Budget of the order search, in simulated steps.

    Raises:
        ConfigError: unknown policy.
        CostError: a module or tp of the plan has no cost table.
    """
    if policy not in POLICIES:
        raise ConfigError(f"unknown scheduling policy `{policy}`", hint=did_you_mean(policy, POLICIES))
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    job = _Job(plan, items, cost.extrapolating(), max_concurrency)
    arrival = job.candidate("arrival", arrival_owners(plan, items))
    best = arrival
    if policy == "balanced":
        balanced = job.balanced(max_evals, max_simulations)
        if balanced.step_s < arrival.step_s or not job.keeps_cap(arrival.owners):
            best = balanced
    return StepPlan(
        run_id=run_id,
        step=step,
        policy=best.policy,
        sample_index=tuple(s.sample_index for s in batch),
        num_microbatches=plan.num_microbatches,
        work=tuple(items[name].work(owner) for name, owner in best.owners.items()),
        num_supervised_tokens=sum(s.num_supervised_tokens for s in batch),
        predicted_step_s=best.step_s,
        arrival_step_s=arrival.step_s,
    )


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """What one stage is expected to see of one microbatch: the predicted half of a `MicrobatchSpan`."""

    microbatch: int
    num_items: int
    num_tokens: int
    sum_sq_tokens: int
    forward_s: float
    backward_s: float


def predicted_spans(
    plan: Plan,
    step_plan: StepPlan,
    batch: Sequence[SampleShape],
    cost: CostModel,
) -> dict[Node, tuple[PredictedSpan, ...]]:
    """Per (module, stage, dp_rank) one span per microbatch, empty microbatches included.

    Args:
        plan: The layout `step_plan` was made for.
        step_plan: Owners.
        batch: The samples of `step_plan.sample_index`, in that order.
        cost: The cost model the step was scheduled with.
    """
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    owners = {w.module: w.owner for w in step_plan.work}
    durations = stage_durations(plan, items, owners, cost.extrapolating())
    loads = {name: np.stack(owner_loads(items[name], owner), axis=-1).tolist() for name, owner in owners.items()}
    spans: dict[Node, tuple[PredictedSpan, ...]] = {}
    for node in step_nodes(plan):
        found = []
        for k, (forward_s, backward_s) in enumerate(durations[node]):
            num_items, num_tokens, sum_sq_tokens = loads[node[0]][k][node[2]]
            found.append(PredictedSpan(k, num_items, num_tokens, sum_sq_tokens, forward_s, backward_s))
        spans[node] = tuple(found)
    return spans


@dataclass(frozen=True, slots=True)
class _Candidate:
    policy: str
    owners: dict[str, Owner]
    graph: OpGraph
    step_s: float


@dataclass(frozen=True, slots=True)
class _Job:
    """One global batch on one plan: what every candidate is built from and judged by."""

    plan: Plan
    items: Mapping[str, ModuleItems]
    cost: CostModel
    max_concurrency: int | None

    @property
    def num_buckets(self) -> int:
        return self.plan.num_microbatches * self.plan.module(LLM).parallel.dp

    def candidate(self, policy: str, owners: Mapping[str, Owner]) -> _Candidate:
        ordered = {m.module: owners[m.module] for m in self.plan.modules}
        work = tuple(self.items[name].work(owner) for name, owner in ordered.items())
        graph = step_graph(self.plan, work, stage_durations(self.plan, self.items, ordered, self.cost))
        return _Candidate(policy, ordered, graph, run_graph(graph, self.max_concurrency).makespan_s)

    def keeps_cap(self, owners: Mapping[str, Owner]) -> bool:
        tokens = self.items[LLM].num_tokens
        cap = token_cap(tokens, self.num_buckets)
        return bool(owner_loads(self.items[LLM], owners[LLM])[1].max() <= cap)

    def balanced(self, max_evals: int, max_simulations: int) -> _Candidate:
        """The balanced packing in the best order found."""
        packed = self.candidate("balanced", self._packed_owners(max_evals))
        m = self.plan.num_microbatches

        def makespan_s(slots: Sequence[int]) -> float:
            return run_graph(with_slot_order(packed.graph, m, slots), self.max_concurrency).makespan_s

        durations = packed.graph.durations_s
        nodes = range(len(packed.graph.node_ops))
        weight_s = [
            sum(durations[op_id(m, n, k, "F")] + durations[op_id(m, n, k, "B")] for n in nodes) for k in range(m)
        ]
        slots, step_s = order_slots(makespan_s, weight_s, max_simulations)
        owners = {name: tuple(owner[k] for k in slots) for name, owner in packed.owners.items()}
        return dataclasses.replace(packed, owners=owners, step_s=step_s)

    def _packed_owners(self, max_evals: int) -> dict[str, Owner]:
        """Samples packed into buckets, buckets of similar size side by side in a slot, encoder items split by LPT."""
        num_ranks = self.plan.module(LLM).parallel.dp
        tokens = self.items[LLM].num_tokens
        weights = self._sample_weights()
        cap = token_cap(tokens, self.num_buckets)
        packing = pack(weights, tokens, self.num_buckets, cap_tokens=cap, max_evals=max_evals)
        buckets: list[list[int]] = [[] for _ in range(self.num_buckets)]
        for position, bucket in enumerate(packing.bucket):
            buckets[bucket].append(position)
        buckets.sort(key=lambda b: (-float(weights[b, -1].sum()), b))
        slots = tuple(
            tuple(tuple(b) for b in buckets[k * num_ranks : (k + 1) * num_ranks])
            for k in range(self.plan.num_microbatches)
        )
        owners: dict[str, Owner] = {LLM: slots}
        for encoder in self.plan.encoders:
            seconds = item_seconds(encoder, self.items[encoder.module], self.cost).tolist()
            in_slot = items_in_slots(self.items[encoder.module], slots)
            owners[encoder.module] = tuple(split_lpt(ids, seconds, encoder.parallel.dp) for ids in in_slot)
        return owners

    def _sample_weights(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """`[samples, modules]`, LLM last: seconds per bucket, an encoder's scaled to its share of a slot."""
        num_samples, num_ranks = len(self.items[LLM].sample), self.plan.module(LLM).parallel.dp
        columns = []
        for m in sorted(self.plan.modules, key=lambda m: m.module == LLM):
            items = self.items[m.module]
            seconds = item_seconds(m, items, self.cost)
            per_sample = np.bincount(np.array(items.sample, dtype=np.int64), seconds, num_samples)
            columns.append(per_sample if m.module == LLM else per_sample * num_ranks / m.parallel.dp)
        return np.stack(columns, axis=1)
