"""Ways to cut a global batch into microbatches: the data-blind ones, what other trainers do, and what runs.

`arrival` counts samples. `length_grouped` puts samples of similar LLM length side by side. `token_lpt` balances LLM
tokens, longest first: the strongest cheap rival. `token_kk` balances them over ranks by Karmarkar and Karp's
differencing. `bottleneck` balances all modules at once, longest first; `program` is that balance as the DFLOP paper
has it, an integer program with a time limit. `quick` is the best of arrival order and of both ways of longest first,
at once and with nothing compiled; where none keeps the caps, what is dealt out by shares of them. `balanced` is the
best of the data-blind ones, of `bottleneck` and of the search on the simulator, so that it never loses against them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop.cost.model import CostModel, Floats
from dflop.errors import ConfigError, did_you_mean
from dflop.records import LLM, ModulePlan, Plan, SampleShape
from dflop.schedule.anneal import search
from dflop.schedule.assignment import Assignment, even_item_ranks, in_sequence, split_under_cap
from dflop.schedule.caps import fullest, keeps, plan_caps
from dflop.schedule.data_parallel import MAX_EVALS, Rerun, balance_ranks
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import Ints, ModuleItems, item_seconds, module_items, stage_slowness
from dflop.schedule.linear import LinearStep, linear_step, sample_weights
from dflop.schedule.pack import over_ranks, token_lpt
from dflop.schedule.place import by_shares, place
from dflop.schedule.program import balance, bottleneck
from dflop.schedule.state import Task, make_task
from dflop.simulate.step import Node

POLICIES = ("arrival", "length_grouped", "token_lpt", "token_kk", "bottleneck", "program", "quick", "balanced")
MOVE_OVERHEAD_OPS = 400
"""A move of the annealing costs as much as so many simulated operations, beside those that it simulates."""

MAX_PROFILES_WITHOUT_PIPELINE = 12


@dataclass(frozen=True, slots=True)
class Effort:
    """Budget of `balanced`, counted in evaluations, so that every machine finds the same."""

    num_profiles: int = 96
    """Ramps that seed the search, fewer where batches are so large that they would cost more than the annealing."""
    num_ops: int = 16_000_000
    """Simulated operations of the annealing, and bucket by bucket comparisons of the ramps, at 1-3 ns each."""
    max_simulations: int = 40_000
    """Moves of the annealing, where steps are so small that `num_ops` would allow more."""
    max_evals: int = MAX_EVALS
    """Moves and swaps between replicas without a pipeline, each looked at."""


QUICK = Effort(num_profiles=6, num_ops=4_000_000, max_simulations=2_000, max_evals=50_000)
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
    ) -> None:
        self.plan, self.cost = plan, cost.extrapolating()
        self.items = items or {m.module: module_items(batch, m.module) for m in plan.modules}
        self.judge = StepEvaluator(plan, self.items, self.cost, max_concurrency, slowness)
        self.caps = plan_caps(plan, self.items)
        self._slowness = slowness or {}

    def choose(self, policy: str, effort: Effort) -> tuple[str, Assignment, float]:
        """(policy, assignment, seconds) of a policy, or of the best candidate where it is one of several.

        Raises:
            ConfigError: unknown policy.
        """
        if policy in ("quick", "balanced"):
            return self.quick(effort) if policy == "quick" else self.best(effort)
        assignment = self.assign(policy, effort)
        return policy, assignment, self.judge.step_s(assignment)

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
            return self._evenly(*divmod(self._token_lpt, self.num_ranks))
        if policy == "token_kk":
            return self._evenly(*over_ranks(tokens, self.num_ranks, self.plan.num_microbatches))
        if policy == "bottleneck":
            return self._in_buckets(self._balanced())
        if policy == "program":
            return self._in_buckets(balance(self.linear, self._balanced()))
        if policy in POLICIES:
            return self.choose(policy, effort)[1]
        raise ConfigError(f"unknown scheduling policy `{policy}`", hint=did_you_mean(policy, POLICIES))

    def quick(self, effort: Effort) -> tuple[str, Assignment, float]:
        """(policy, assignment, seconds) of the best of arrival order and of what is dealt out longest first.

        Where none keeps the caps, packings by each sample's share of the caps are tried, too.
        """
        found = [("arrival", self.assign("arrival", effort))]
        best = self._best_of(
            [*found, *(("quick", self._in_buckets(bucket)) for bucket in (self._seconds_lpt, self._token_lpt))]
        )
        if self.keeps_caps(best[1]):
            return best
        return self._best_of([best[:2], *(("quick", self._in_buckets(b)) for b in by_shares(self.linear))])

    def best(self, effort: Effort) -> tuple[str, Assignment, float]:
        """(policy, assignment, seconds) of the best candidate that keeps the caps; the data-blind ones stand, too."""
        found = [("arrival", self.assign("arrival", effort))]
        found += [("balanced", self.assign(rival, effort)) for rival in ("length_grouped", "token_lpt", "bottleneck")]
        step = self.linear
        if len(step.tokens):
            # Without a pipeline only the sums of the ranks count, and no search comes closer to the best of them.
            is_parallel = len(step.pipe_pp) == 1 and step.pipe_pp[0] == 1
            over_ranks = self._over_ranks(effort.max_evals) if is_parallel else None
            if over_ranks is not None:
                found.append(("balanced", over_ranks))
            if over_ranks is None or step.meets:
                seeds = [a.slot * self.num_ranks + a.rank for _, a in found]
                found += [("balanced", a) for a in self._searched(seeds, effort)]
        return self._best_of(found)

    def keeps_caps(self, assignment: Assignment) -> bool:
        """Whether an assignment exceeds nothing that the plan's memory holds."""
        return keeps(self.caps, self.plan, self.items, assignment)

    @property
    def num_ranks(self) -> int:
        """Data-parallel, of the LLM."""
        return self.plan.module(LLM).parallel.dp

    @property
    def num_buckets(self) -> int:
        return self.plan.num_microbatches * self.num_ranks

    @cached_property
    def linear(self) -> LinearStep:
        """The step as the search sees it."""
        return linear_step(self.plan, self.items, self.cost, self.caps, self._slowness)

    @cached_property
    def task(self) -> Task:
        """The same for kernels."""
        return make_task(self.linear)

    def _best_of(self, found: Sequence[tuple[str, Assignment]]) -> tuple[str, Assignment, float]:
        """The fastest that keeps the caps; where none does, the one that exceeds them least."""
        fills = [fullest(self.caps, self.plan, self.items, a).frac for _, a in found]
        least = max(1.0, min(fills))
        step_s, index = min((self.judge.step_s(found[i][1]), i) for i, frac in enumerate(fills) if frac <= least)
        return (*found[index], step_s)

    def _searched(self, seeds: list[Ints], effort: Effort) -> list[Assignment]:
        step = self.linear
        depth = int(step.num_after.max(initial=0)) + 1
        num_profiles = 1 + effort.num_ops // (len(step.tokens) * self.num_buckets)
        if depth == 1:  # no pipeline to fill and to drain: ramps are but other places to start from
            num_profiles = min(num_profiles, MAX_PROFILES_WITHOUT_PIPELINE)
        buckets = search(
            self.task,
            [*seeds, self._seconds_lpt],
            depth=depth,
            num_profiles=min(effort.num_profiles, num_profiles) - 1,
            num_moves=min(effort.max_simulations, effort.num_ops // (step.num_ops + MOVE_OVERHEAD_OPS)),
        )
        return [self._in_buckets(bucket) for bucket in buckets]

    def _evenly(self, slot: Ints, rank: Ints) -> Assignment:
        """Media items cut by count, as a trainer does that does not look at them."""

        def ranks(encoder: ModulePlan, items: ModuleItems) -> Ints:
            return even_item_ranks(items, slot, self.plan.num_microbatches, encoder.parallel.dp)

        return Assignment(slot, rank, self._item_ranks(rank, ranks))

    def _in_buckets(self, bucket: Ints) -> Assignment:
        """Media items split by their seconds, by tokens where memory asks for it."""
        slot, rank = divmod(bucket, self.num_ranks)

        def ranks(encoder: ModulePlan, items: ModuleItems) -> Ints:
            return split_under_cap(
                slot[items.sample_of],
                self._item_seconds[encoder.module],
                items.num_tokens,
                self.plan.num_microbatches,
                encoder.parallel.dp,
                stage_slowness(encoder, self._slowness).max(axis=0),
                cap_tokens=self.caps.media_tokens.get(encoder.module),
            )

        return Assignment(slot, rank, self._item_ranks(rank, ranks))

    @cached_property
    def _item_seconds(self) -> dict[str, Floats]:
        return {e.module: item_seconds(e, self.items[e.module], self.cost) for e in self.plan.apart}

    def _item_ranks(self, rank: Ints, split: Callable[[ModulePlan, ModuleItems], Ints]) -> dict[str, Ints]:
        own = {e.module: self.items[e.module] for e in self.plan.encoders}
        apart = {e.module for e in self.plan.apart}
        return {
            e.module: split(e, own[e.module]) if e.module in apart else rank[own[e.module].sample_of]
            for e in self.plan.encoders
        }

    @cached_property
    def _seconds_lpt(self) -> Ints:
        """Buckets of longest first, on the seconds of all modules."""
        return next(place(self.task, [np.ones(self.plan.num_microbatches)]))

    @cached_property
    def _token_lpt(self) -> Ints:
        return token_lpt(self.items[LLM].num_tokens, self.num_buckets)

    def _balanced(self) -> Ints:
        """The better of two longest-first assignments, by the worst module of the worst bucket."""
        weights_s = sample_weights(self.linear)
        return min(
            self._seconds_lpt, self._token_lpt, key=lambda bucket: bottleneck(weights_s, bucket, self.num_buckets)
        )

    def _over_ranks(self, max_evals: int) -> Assignment | None:
        """Balanced seconds of replicas without a pipeline; None where that breaks a cap."""
        step = self.linear
        seconds_s, fixed_s, limits = step.slowest_stage
        try:
            found = balance_ranks(
                seconds_s,
                step.tokens,
                self.num_ranks,
                cap_tokens=max(1, min(step.cap_tokens, step.cap_in_flight_tokens)),
                fixed_s=fixed_s,
                num_microbatches=step.num_slots if step.meets else None,
                max_microbatches=step.num_slots,
                sync="microbatch" if step.meets else "step",
                slowness=step.replica_slowness,
                rerun=Rerun(step.rerun_s, step.rerun_fixed_s, limits) if limits else None,
                max_evals=max_evals,
            )
        except ConfigError:  # so few microbatches do not hold them
            return None
        assignment = self._in_buckets(found.slot * self.num_ranks + found.rank)
        return assignment if self.keeps_caps(assignment) else None
