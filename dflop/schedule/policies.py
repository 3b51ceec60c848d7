"""Ways to cut a global batch into microbatches: the data-blind ones, what other trainers do, and what runs.

`arrival` counts samples. `length_grouped` puts samples of similar LLM length side by side. `token_lpt` balances LLM
tokens, longest first: the strongest cheap rival. `bottleneck` balances all modules at once, with a certificate.
`balanced` is the best of all of these and of the search on the simulator, so that it never loses against any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import CostModel, Floats
from dflop.errors import ConfigError, did_you_mean
from dflop.records import LLM, Plan, SampleShape
from dflop.schedule.anneal import search
from dflop.schedule.assignment import Assignment, even_item_ranks, in_sequence
from dflop.schedule.evaluate import StepEvaluator, bucket_tokens
from dflop.schedule.items import Ints, ModuleItems, item_seconds, module_items
from dflop.schedule.linear import LinearStep, linear_step, plan_token_cap, sample_weights
from dflop.schedule.order import order_slots
from dflop.schedule.pack import pack, token_cap, token_lpt
from dflop.schedule.place import place, split_items

POLICIES = ("arrival", "length_grouped", "token_lpt", "bottleneck", "balanced")


@dataclass(frozen=True, slots=True)
class Effort:
    """Budget of `balanced`, counted in evaluations, so that every machine finds the same."""

    num_profiles: int = 81
    """Ramps that seed the search, fewer where batches are so large that they would cost more than the annealing."""
    num_ops: int = 40_000_000
    """Simulated operations of the annealing, and bucket by bucket comparisons of the ramps, at 20-100 ns each."""
    max_simulations: int = 20_000
    """Of the annealing, where steps are so small that `num_ops` would allow more."""
    max_evals: int = 20_000
    """Moves of the certified balance; 0 leaves it out."""
    max_orders: int = 48
    """Orders tried under the reference simulator, where processes share cores."""


QUICK = Effort(num_profiles=12, num_ops=1_000_000, max_simulations=300, max_evals=0, max_orders=12)
"""For ranking plans: close to what the full effort reaches, at a hundredth of its price."""


class StepJob:
    """One global batch on one plan: makes and judges assignments.

    Args:
        plan: Lists the LLM last.
        batch: Samples in arrival order; may be shorter than the plan's global batch.
        cost: Predicts seconds, corrections included.
        max_concurrency: Processes that can compute at once; None: all of them.
        items: Of the batch, by module, where they are known from another plan.
    """

    def __init__(
        self,
        plan: Plan,
        batch: Sequence[SampleShape],
        cost: CostModel,
        max_concurrency: int | None = None,
        items: Mapping[str, ModuleItems] | None = None,
    ) -> None:
        self.plan, self.cost = plan, cost.extrapolating()
        self.items = items or {m.module: module_items(batch, m.module) for m in plan.modules}
        self.judge = StepEvaluator(plan, self.items, self.cost, max_concurrency)
        self._linear: LinearStep | None = None
        self._item_seconds: dict[str, Floats] = {}

    def assign(self, policy: str, effort: Effort) -> Assignment:
        """Assignment by a policy.

        Raises:
            ConfigError: unknown policy.
        """
        tokens = self.items[LLM].num_tokens
        if policy == "arrival":
            slot, rank = in_sequence(np.arange(len(tokens)), self.plan)
            return self._evenly(slot, rank)
        if policy == "length_grouped":
            slot, rank = in_sequence(np.argsort(-tokens, kind="stable"), self.plan)
            return self._evenly(slot, rank)
        if policy == "token_lpt":
            return self._evenly(*self._slot_rank(token_lpt(tokens, self.num_buckets)))
        if policy == "bottleneck":
            return self._bottleneck(effort.max_evals)
        if policy == "balanced":
            return self.best(effort)[1]
        raise ConfigError(f"unknown scheduling policy `{policy}`", hint=did_you_mean(policy, POLICIES))

    def best(self, effort: Effort) -> tuple[str, Assignment, float]:
        """(policy, assignment, seconds) of the best candidate that keeps the caps; the data-blind ones stand, too."""
        found = [("arrival", self.assign("arrival", effort)), ("balanced", self.assign("token_lpt", effort))]
        seeds = [self._buckets(a) for _, a in found]
        if effort.max_evals and len(self.items[LLM].sample):
            packed = self._bottleneck(effort.max_evals)
            found.append(("balanced", packed))
            seeds.append(self._buckets(packed))
        if self._is_data_parallel:
            seeds.append(self._rank_sums())
        step = self.linear
        if len(step.tokens):
            # A move costs a simulation, and looking through the samples of two slots, twice where it is undone.
            num_simulations = effort.num_ops // (step.num_ops + 4 * len(step.tokens))
            num_profiles = 1 + effort.num_ops // (len(step.tokens) * self.num_buckets)
            bucket = search(
                step,
                seeds,
                num_profiles=min(effort.num_profiles, num_profiles),
                num_simulations=min(effort.max_simulations, num_simulations),
            )
            found.append(("balanced", self._splitting(*self._slot_rank(bucket))))
        if self.judge.max_concurrency is not None:
            found.append(("balanced", self._reordered(found[-1][1], effort.max_orders)))
        scored = [(not self.keeps_caps(a), self.judge.step_s(a), i) for i, (_, a) in enumerate(found)]
        _, step_s, index = min(scored)
        return (*found[index], step_s)

    def keeps_caps(self, assignment: Assignment) -> bool:
        """Whether no microbatch of any module exceeds what the plan's memory holds."""
        for m in self.plan.modules:
            items = self.items[m.module]
            largest = bucket_tokens(items, assignment, self.plan.num_microbatches, m.parallel.dp).max(initial=0)
            if m.module == LLM:
                if largest > plan_token_cap(self.plan, items.num_tokens):
                    return False
            elif m.max_tokens and largest > max(m.max_tokens, items.num_tokens.max(initial=0)):
                return False
        return True

    @property
    def num_buckets(self) -> int:
        return self.plan.num_microbatches * self.plan.module(LLM).parallel.dp

    @property
    def linear(self) -> LinearStep:
        """The step as the search sees it."""
        if self._linear is None:
            self._linear = linear_step(self.plan, self.items, self.cost)
        return self._linear

    @property
    def _is_data_parallel(self) -> bool:
        return len(self.linear.pipe_pp) == 1 and int(self.linear.pipe_pp[0]) == 1

    def _buckets(self, assignment: Assignment) -> Ints:
        buckets: Ints = assignment.slot * self.plan.module(LLM).parallel.dp + assignment.rank
        return buckets

    def _slot_rank(self, bucket: Ints) -> tuple[Ints, Ints]:
        num_ranks = self.plan.module(LLM).parallel.dp
        return bucket // num_ranks, bucket % num_ranks

    def _evenly(self, slot: Ints, rank: Ints) -> Assignment:
        """Media items cut by count, as a trainer does that does not look at them."""
        return self._with_items(slot, rank, is_even=True)

    def _splitting(self, slot: Ints, rank: Ints) -> Assignment:
        """Media items split by their seconds."""
        return self._with_items(slot, rank, is_even=False)

    def _with_items(self, slot: Ints, rank: Ints, *, is_even: bool) -> Assignment:
        ranks: dict[str, Ints] = {}
        for encoder in self.plan.encoders:
            items, dp, num_slots = self.items[encoder.module], encoder.parallel.dp, self.plan.num_microbatches
            if self.plan.is_inline:
                ranks[encoder.module] = rank[items.sample_of]
            elif is_even:
                ranks[encoder.module] = even_item_ranks(items, slot, num_slots, dp)
            else:
                if encoder.module not in self._item_seconds:
                    self._item_seconds[encoder.module] = item_seconds(encoder, items, self.cost)
                seconds = self._item_seconds[encoder.module]
                ranks[encoder.module] = split_items(slot[items.sample_of], seconds, num_slots, dp)
        return Assignment(slot, rank, ranks)

    def _bottleneck(self, max_evals: int) -> Assignment:
        """Balanced buckets, those of similar size side by side in a slot."""
        tokens, num_ranks = self.items[LLM].num_tokens, self.plan.module(LLM).parallel.dp
        weights = sample_weights(self.linear)
        cap = max(self.linear.cap_tokens, token_cap(tokens, self.num_buckets))
        packing = pack(weights, tokens, self.num_buckets, cap_tokens=cap, max_evals=max_evals)
        bucket = np.array(packing.bucket, dtype=np.int64)
        order = np.argsort(-np.bincount(bucket, weights[:, -1], self.num_buckets), kind="stable")
        position = np.empty(self.num_buckets, dtype=np.int64)
        position[order] = np.arange(self.num_buckets)
        return self._splitting(position[bucket] // num_ranks, position[bucket] % num_ranks)

    def _rank_sums(self) -> Ints:
        """Without a pipeline only the sums of the ranks count: balance those, then cut each by tokens."""
        step, num_ranks = self.linear, self.plan.module(LLM).parallel.dp
        rank = place_on_ranks(step)
        slot = split_items(rank, step.tokens.astype(float), num_ranks, step.num_slots)
        bucket: Ints = slot * num_ranks + rank
        return bucket

    def _reordered(self, assignment: Assignment, max_orders: int) -> Assignment:
        """The same slots in a better order under contention, which the compiled search does not see."""
        work = self.judge.work(assignment)
        weight_s = (work.forward_s + work.backward_s).sum(axis=0).tolist()

        def step_s(slots: Sequence[int]) -> float:
            return self.judge.step_s(assignment.in_order(np.array(slots, dtype=np.int64)))

        slots, _ = order_slots(step_s, weight_s, max_orders)
        return assignment.in_order(np.array(slots, dtype=np.int64))


def place_on_ranks(step: LinearStep) -> Ints:
    """Rank of every sample when each rank's whole step is one bucket."""
    whole = LinearStep(
        1, step.num_ranks, step.chain_s, step.slot_s, step.tokens, step.num_items, step.pipe_pp, step.stage_kind,
        step.fixed_s, step.forward_frac, step.num_after, cap_tokens=int(step.tokens.sum()),
    )  # fmt: skip
    return place(whole, np.ones(1))


def simulated_step_s(
    plan: Plan,
    batch: Sequence[SampleShape],
    cost: CostModel,
    *,
    policy: str = "balanced",
    max_concurrency: int | None = None,
    effort: Effort | None = None,
) -> float:
    """Seconds of one step of a global batch under a plan and a policy, gradient synchronisation included.

    Raises:
        ConfigError: unknown policy.
        CostError: a module or tp of the plan has no cost table.
    """
    job = StepJob(plan, batch, cost, max_concurrency)
    if policy == "balanced":
        return job.best(effort or Effort())[2] + plan.sync_s
    return job.judge.step_s(job.assign(policy, effort or Effort())) + plan.sync_s
