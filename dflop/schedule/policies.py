"""Ways to cut a global batch into microbatches: the data-blind ones, what other trainers do, and what runs.

`arrival` counts samples. `length_grouped` puts samples of similar LLM length side by side. `token_lpt` balances LLM
tokens, longest first: the strongest cheap rival. `bottleneck` balances all modules at once, with a certificate.
`quick` is the better one of arrival and that balance, at once and with nothing compiled; where neither keeps the caps,
what is dealt out by tokens or by shares of the caps. `balanced` is the best of all of these and of the search on the
simulator, so that it never loses against any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import CostModel, Floats
from dflop.errors import ConfigError, did_you_mean
from dflop.records import LLM, ModulePlan, Plan, SampleShape
from dflop.schedule import karmarkar_karp
from dflop.schedule.anneal import search
from dflop.schedule.assignment import Assignment, even_item_ranks, in_sequence
from dflop.schedule.caps import fullest, keeps, plan_caps
from dflop.schedule.data_parallel import MAX_EVALS, Sync, balance_ranks
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import Ints, ModuleItems, item_seconds, module_items, stage_slowness
from dflop.schedule.linear import LinearStep, linear_step, sample_weights
from dflop.schedule.microbatch_order import order_slots
from dflop.schedule.pack import pack, token_lpt
from dflop.schedule.place import split_under_cap
from dflop.schedule.within_memory import by_shares
from dflop.simulate.jit import IS_COMPILED
from dflop.simulate.step import Node

POLICIES = ("arrival", "length_grouped", "token_lpt", "token_kk", "bottleneck", "quick", "balanced")
MOVE_OPS = 400
"""A move of the annealing costs as much as so many simulated operations, beside those that it simulates."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Budget of `balanced`, counted in evaluations, so that every machine finds the same."""

    num_profiles: int = 4
    """Ramps that seed the search, fewer where batches are so large that they would cost more than the annealing."""
    num_ops: int = 16_000_000
    """Simulated operations of the annealing, and bucket by bucket comparisons of the ramps, at 1-3 ns each."""
    max_simulations: int = 40_000
    """Moves of the annealing, where steps are so small that `num_ops` would allow more."""
    max_evals: int = 100_000
    """Moves of the certified balance; 0 leaves it out."""
    max_orders: int = 48
    """Orders tried under the reference simulator, where processes share cores."""
    num_chains: int = 1
    """Annealings side by side, each with this budget; one of twice the length finds more than two of them."""


THOROUGH = Effort(num_profiles=24, num_ops=340_000_000, max_simulations=400_000, max_evals=2_000_000)
"""Ten times the time, for what is left."""
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
        slowness: What multiplies the seconds of nodes; 1.0 where absent.
        compiled: False: no kernel is touched, and what only pays when compiled is left out.
        num_threads: Annealing chains that run at a time; changes nothing in the result.
    """

    def __init__(
        self,
        plan: Plan,
        batch: Sequence[SampleShape],
        cost: CostModel,
        max_concurrency: int | None = None,
        items: Mapping[str, ModuleItems] | None = None,
        *,
        slowness: Mapping[Node, float] | None = None,
        compiled: bool = IS_COMPILED,
        num_threads: int = 1,
    ) -> None:
        self.plan, self.cost = plan, cost.extrapolating()
        self.items = items or {m.module: module_items(batch, m.module) for m in plan.modules}
        self.compiled, self.num_threads = compiled, num_threads
        self.judge = StepEvaluator(plan, self.items, self.cost, max_concurrency, slowness, compiled=compiled)
        self.caps = plan_caps(plan, self.items, compiled=compiled)
        self._slowness = slowness or {}
        self._linear: LinearStep | None = None
        self._item_seconds: dict[str, Floats] = {}

    def assign(self, policy: str, effort: Effort) -> Assignment:
        """Assignment by a policy.

        Raises:
            ConfigError: unknown policy.
        """
        tokens = self.items[LLM].num_tokens
        if policy == "arrival":
            return self._evenly(*in_sequence(np.arange(len(tokens)), self.plan))
        if policy == "length_grouped":
            return self._evenly(*in_sequence(np.argsort(-tokens, kind="stable"), self.plan))
        if policy == "token_lpt":
            return self._evenly(*self._slot_rank(token_lpt(tokens, self.num_buckets, compiled=self.compiled)))
        if policy == "token_kk":
            dp = self.plan.module(LLM).parallel.dp
            return self._evenly(*karmarkar_karp.over_ranks(tokens, dp, self.plan.num_microbatches))
        if policy == "bottleneck":
            return self._bottleneck(effort.max_evals)
        if policy == "quick":
            return self.quick(effort)[1]
        if policy == "balanced":
            return self.best(effort)[1]
        raise ConfigError(f"unknown scheduling policy `{policy}`", hint=did_you_mean(policy, POLICIES))

    def quick(self, effort: Effort) -> tuple[str, Assignment, float]:
        """(policy, assignment, seconds) of the better one of arrival order and the certified balance.

        Where replicas are not equally fast, the balance of their slots stands beside these; where none keeps the caps,
        samples dealt out by their shares of them.
        """
        found = [("arrival", self.assign("arrival", effort)), ("quick", self._bottleneck(effort.max_evals))]
        uneven = self._over_uneven_ranks()
        best = self._best_of(found if uneven is None else [*found, ("quick", uneven)])
        if self.keeps_caps(best[1]):
            return best
        by_tokens = self._slot_rank(token_lpt(self.linear.tokens, self.num_buckets, compiled=self.compiled))
        within = [("quick", self._splitting(*place)) for place in (by_tokens, *by_shares(self.linear))]
        return self._best_of([best[:2], *within])

    def best(self, effort: Effort) -> tuple[str, Assignment, float]:
        """(policy, assignment, seconds) of the best candidate that keeps the caps; the data-blind ones stand, too."""
        found = [("arrival", self.assign("arrival", effort))]
        found += [("balanced", self.assign(rival, effort)) for rival in ("length_grouped", "token_lpt")]
        if effort.max_evals:
            found.append(("balanced", self._bottleneck(effort.max_evals)))
        uneven = self._over_uneven_ranks()
        if uneven is not None:
            found.append(("balanced", uneven))
        over_ranks = self._over_ranks()
        if over_ranks is not None:
            found.append(("balanced", over_ranks))
        elif self.compiled and len(self.linear.tokens):
            found += [("balanced", a) for a in self._searched([self._buckets(a) for _, a in found], effort)]
        policy, assignment, step_s = self._best_of(found)
        if self.judge.max_concurrency is None:
            return policy, assignment, step_s
        reordered = self._reordered(assignment, effort.max_orders)
        return self._best_of([(policy, assignment), ("balanced", reordered)])

    def keeps_caps(self, assignment: Assignment) -> bool:
        """Whether an assignment exceeds nothing that the plan's memory holds."""
        return keeps(self.caps, self.plan, self.items, assignment)

    @property
    def num_buckets(self) -> int:
        return self.plan.num_microbatches * self.plan.module(LLM).parallel.dp

    @property
    def linear(self) -> LinearStep:
        """The step as the search sees it."""
        if self._linear is None:
            self._linear = linear_step(self.plan, self.items, self.cost, self.caps, self._slowness)
        return self._linear

    def _best_of(self, found: Sequence[tuple[str, Assignment]]) -> tuple[str, Assignment, float]:
        """The fastest that keeps the caps; where none does, the one that exceeds them least."""
        fills = [fullest(self.caps, self.plan, self.items, a).frac for _, a in found]
        scored = [
            (f if f > 1 else 0.0, self.judge.step_s(a), i)
            for i, (f, (_, a)) in enumerate(zip(fills, found, strict=True))
        ]
        _, step_s, index = min(scored)
        return (*found[index], step_s)

    def _searched(self, seeds: list[Ints], effort: Effort) -> list[Assignment]:
        step = self.linear
        num_profiles = 1 + effort.num_ops // (len(step.tokens) * self.num_buckets)
        buckets = search(
            step,
            seeds,
            num_profiles=min(effort.num_profiles, num_profiles),
            num_moves=min(effort.max_simulations, effort.num_ops // (step.num_ops + MOVE_OPS)),
            num_chains=effort.num_chains,
            num_threads=self.num_threads,
        )
        return [self._splitting(*self._slot_rank(bucket)) for bucket in buckets]

    def _buckets(self, assignment: Assignment) -> Ints:
        buckets: Ints = assignment.slot * self.plan.module(LLM).parallel.dp + assignment.rank
        return buckets

    def _slot_rank(self, bucket: Ints) -> tuple[Ints, Ints]:
        num_ranks = self.plan.module(LLM).parallel.dp
        return bucket // num_ranks, bucket % num_ranks

    def _evenly(self, slot: Ints, rank: Ints) -> Assignment:
        """Media items cut by count, as a trainer does that does not look at them."""

        def ranks(encoder: ModulePlan, items: ModuleItems) -> Ints:
            return even_item_ranks(items, slot, self.plan.num_microbatches, encoder.parallel.dp)

        return Assignment(slot, rank, self._item_ranks(rank, ranks))

    def _splitting(self, slot: Ints, rank: Ints) -> Assignment:
        """Media items split by their seconds, by tokens where memory asks for it."""

        def ranks(encoder: ModulePlan, items: ModuleItems) -> Ints:
            if encoder.module not in self._item_seconds:
                self._item_seconds[encoder.module] = item_seconds(encoder, items, self.cost)
            return split_under_cap(
                slot[items.sample_of],
                self._item_seconds[encoder.module],
                items.num_tokens,
                self.plan.num_microbatches,
                encoder.parallel.dp,
                stage_slowness(encoder, self._slowness).max(axis=0),
                cap_tokens=self.caps.media_tokens.get(encoder.module),
                compiled=self.compiled,
            )

        return Assignment(slot, rank, self._item_ranks(rank, ranks))

    def _item_ranks(self, rank: Ints, split: Callable[[ModulePlan, ModuleItems], Ints]) -> dict[str, Ints]:
        if self.plan.is_inline:
            return {e.module: rank[self.items[e.module].sample_of] for e in self.plan.encoders}
        return {e.module: split(e, self.items[e.module]) for e in self.plan.encoders}

    def _bottleneck(self, max_evals: int) -> Assignment:
        """Balanced buckets, those of similar size side by side in a slot, the larger ones on the faster ranks."""
        step, num_ranks = self.linear, self.plan.module(LLM).parallel.dp
        weights = sample_weights(step)
        tokens, caps = step.tokens[:, None], [step.cap_tokens]
        if step.is_inline:
            bound = np.flatnonzero(step.cap_media_tokens)
            tokens, caps = np.column_stack([tokens, *step.media_tokens[bound]]), [*caps, *step.cap_media_tokens[bound]]
        packing = pack(weights, tokens, self.num_buckets, cap_tokens=caps, max_evals=max_evals, compiled=self.compiled)
        bucket = np.array(packing.bucket, dtype=np.int64)
        order = np.argsort(-np.bincount(bucket, weights[:, -1], self.num_buckets), kind="stable")
        position = np.empty(self.num_buckets, dtype=np.int64)
        position[order] = np.arange(self.num_buckets)
        fastest_first = np.argsort(step.replica_slowness, kind="stable")
        return self._splitting(position[bucket] // num_ranks, fastest_first[position[bucket] % num_ranks])

    def _over_ranks(self) -> Assignment | None:
        """Without a pipeline only the sums of the ranks count; None with one, or where that breaks a cap."""
        step = self.linear
        if len(step.pipe_pp) > 1 or step.pipe_pp[0] > 1 or not len(step.tokens):
            return None
        return self._dealt_out("step", MAX_EVALS)

    def _over_uneven_ranks(self) -> Assignment | None:
        """Buckets that replicas of different speeds have done in about the same time; None where they do not differ.

        A greedy start: what is left to gain, the annealing finds sooner.
        """
        step = self.linear
        if not len(step.tokens) or (step.replica_slowness == step.replica_slowness[0]).all():
            return None
        return self._dealt_out("microbatch", max_evals=0)

    def _dealt_out(self, sync: Sync, max_evals: int) -> Assignment | None:
        """Balanced seconds of the replicas' slowest stages; None where that breaks a cap."""
        step, num_ranks = self.linear, self.plan.module(LLM).parallel.dp
        kind = step.slowest_kind
        try:
            found = balance_ranks(
                step.chain_s[kind],
                step.tokens,
                num_ranks,
                cap_tokens=max(1, min(step.cap_tokens, step.cap_in_flight_tokens)),
                fixed_s=step.fixed_of_chain(kind),
                num_microbatches=None if sync == "step" else step.num_slots,
                max_microbatches=step.num_slots,
                sync=sync,
                slowness=step.replica_slowness,
                max_evals=max_evals,
                compiled=self.compiled,
            )
        except ConfigError:  # so few microbatches do not hold them
            return None
        assignment = self._splitting(found.slot, found.rank)
        return assignment if self.keeps_caps(assignment) else None

    def _reordered(self, assignment: Assignment, max_orders: int) -> Assignment:
        """The same slots in a better order under contention, which the compiled search does not see."""
        work = self.judge.work(assignment)
        weight_s = (work.forward_s + work.backward_s).sum(axis=0).tolist()

        def step_s(slots: Sequence[int]) -> float:
            return self.judge.step_s(assignment.in_order(np.array(slots, dtype=np.int64)))

        slots, _ = order_slots(step_s, weight_s, max_orders)
        return assignment.in_order(np.array(slots, dtype=np.int64))
