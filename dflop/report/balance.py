"""What balancing changed: where the time of each stage goes, and how even its microbatches are, under both policies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflop import units
from dflop.records import Plan, StepObservation
from dflop.report.comparison import ARRIVAL, BALANCED, BatchPair
from dflop.report.observed_steps import MeasuredStep
from dflop.report.tables import POLICY_NAMES, Table, stage_name


@dataclass(frozen=True, slots=True)
class StageShares:
    """Where the time of all ranks of a stage went; shares of the step, together 1."""

    policy: str
    stage: str
    """`llm pp0`."""
    busy_frac: float
    update_frac: float
    """Gradient reduction, with the wait for slower ranks, and optimizer."""
    wait_frac: float
    """Everything else: waiting for other stages, or for a core."""

    @property
    def idle_frac(self) -> float:
        """All but forward and backward, as the view `v_stage_idle` counts it."""
        return 1.0 - self.busy_frac


@dataclass(frozen=True, slots=True)
class Evenness:
    """Measured compute seconds of the microbatches of a stage in one step."""

    policy: str
    stage: str
    seconds: tuple[tuple[float, ...], ...]
    """`seconds[microbatch]` = of each data-parallel rank that had work, forward and backward."""

    @property
    def max_over_mean(self) -> float:
        """1 where all microbatches of all ranks take the same; NaN without any."""
        flat = [s for of in self.seconds for s in of]
        return max(flat) / statistics.fmean(flat) if flat and max(flat) > 0 else math.nan


def stage_shares(pairs: Sequence[BatchPair], plan: Plan) -> tuple[StageShares, ...]:
    """Shares of every stage under both policies, over all steps of the comparison, stages in the plan's order."""
    arrival = [step for pair in pairs for step in pair.arrival]
    balanced = [step for pair in pairs for step in pair.balanced]
    return tuple(
        _shares(policy, stage_name(plan, module, stage), ranks)
        for (module, stage), of_policies in _by_stage(plan, {ARRIVAL: arrival, BALANCED: balanced})
        for policy, ranks in of_policies.items()
        if ranks
    )


def evenness(pair: BatchPair, plan: Plan) -> tuple[Evenness, ...]:
    """The microbatches of one batch, of the busiest stage of every module, data-blind before balanced."""
    steps = dict(zip((ARRIVAL, BALANCED), ([step] for step in pair.typical()), strict=True))
    busiest: dict[str, tuple[float, int, dict[str, list[StepObservation]]]] = {}
    for (module, stage), of_policies in _by_stage(plan, steps):
        busy_s = sum(rank.busy_s for ranks in of_policies.values() for rank in ranks)
        if busy_s > busiest.get(module, (0.0,))[0]:
            busiest[module] = busy_s, stage, of_policies
    return tuple(
        Evenness(policy, stage_name(plan, module, stage), _seconds(ranks, plan.num_microbatches))
        for module, (_, stage, of_policies) in busiest.items()
        for policy, ranks in of_policies.items()
    )


def shares_table(found: Iterable[StageShares]) -> Table:
    """One row per stage and policy."""
    return Table(
        "Idle time per stage",
        ("stage", "policy", "forward + backward", "waiting", "reduction + optimizer", "idle"),
        tuple(
            (
                s.stage,
                POLICY_NAMES[s.policy],
                units.percent(s.busy_frac),
                units.percent(s.wait_frac),
                units.percent(s.update_frac),
                units.percent(s.idle_frac),
            )
            for s in found
        ),
        frozenset({"stage", "policy"}),
        "Measured on the comparison's batches; shares of the step over all ranks of a stage. Idle: waiting, reduction "
        "and optimizer.",
    )


def evenness_table(pairs: Sequence[BatchPair], plan: Plan) -> Table:
    """Per module the largest microbatch over the mean one, the mean over all batches of the comparison."""
    found: dict[tuple[str, str], list[float]] = {}
    for pair in pairs:
        for even in evenness(pair, plan):
            found.setdefault((even.stage, even.policy), []).append(even.max_over_mean)
    stages = list(dict.fromkeys(stage for stage, _ in found))
    return Table(
        "Balance of microbatches",
        ("stage", "data-blind", "balanced"),
        tuple(
            (stage, *(units.ratio(_mean(found.get((stage, p), []))) for p in (ARRIVAL, BALANCED))) for stage in stages
        ),
        frozenset({"stage"}),
        "Measured: seconds of compute of the largest microbatch over the mean one, all microbatches and ranks of the "
        "stage; mean over the comparison's batches. 1.00x is even. A pipeline may gain by uneven microbatches in the "
        "right order, so less is not always better.",
    )


def _by_stage(
    plan: Plan, steps: dict[str, list[MeasuredStep]]
) -> list[tuple[tuple[str, int], dict[str, list[StepObservation]]]]:
    found: dict[tuple[str, int], dict[str, list[StepObservation]]] = {}
    for policy, of_policy in steps.items():
        for step in of_policy:
            for rank in step.ranks:
                stage = found.setdefault((rank.module, rank.stage), {name: [] for name in steps})
                stage[policy].append(rank)
    place = {m.module: i for i, m in enumerate(sorted(plan.modules, key=lambda m: m.first_rank))}
    return sorted(found.items(), key=lambda item: (place.get(item[0][0], len(place)), item[0]))


def _shares(policy: str, stage: str, ranks: Sequence[StepObservation]) -> StageShares:
    step_s = sum(rank.step_s for rank in ranks)
    busy_frac = sum(rank.busy_s for rank in ranks) / step_s
    update_frac = sum(rank.reduce_s + rank.optimizer_s for rank in ranks) / step_s
    return StageShares(policy, stage, busy_frac, update_frac, 1.0 - busy_frac - update_frac)


def _seconds(ranks: Sequence[StepObservation], num_microbatches: int) -> tuple[tuple[float, ...], ...]:
    """The ranks of a tensor-parallel group do the same work: the slowest speaks for them."""
    of_replica: dict[tuple[int, int], float] = {}
    for rank in ranks:
        for span in rank.spans:
            place, seconds = (span.microbatch, rank.dp_rank), span.forward_compute_s + span.backward_compute_s
            of_replica[place] = max(seconds, of_replica.get(place, 0.0))
    return tuple(
        tuple(s for (k, _), s in sorted(of_replica.items()) if k == microbatch)
        for microbatch in range(num_microbatches)
    )


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.fmean(known) if known else math.nan
