"""From observations of the same global batches under several policies to ratios, beside what simulations say.

Figures that stand for one ratio of step times: `measured`, wall seconds of real steps. `simulated`: the simulator on
the costs that scheduled the steps, which are cost tables profiled before and corrected as a run corrects them, from a
few steps on other samples. `profiled`: the same steps simulated without the corrections. `replayed`: the simulator on
the wall seconds that each microbatch really took, so that what it and `measured` differ by is the simulator's fault,
and what it and `simulated` differ by that of the costs or of the machine's noise.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM, Plan, SampleShape, StepObservation, StepPlan
from tests.bench.schedule.real_cases import Case
from tests.bench.schedule.real_costs import Costs, Durations, simulated


@dataclass(frozen=True)
class Policy:
    """One policy in one case; seconds are means over global batches, idle shares are per process."""

    measured_step_s: float
    simulated_step_s: float
    replayed_step_s: float
    measured_idle_frac: tuple[float, ...]
    """Of the pipeline; of replicas, of the slower one's forward and backward."""
    simulated_idle_frac: tuple[float, ...]
    num_kept_arrival: int
    """Global batches for which the policy found nothing better than arrival order."""


@dataclass(frozen=True)
class Ratio:
    """Step time under one policy over that under another, on the same global batches; above 1 the latter is faster."""

    measured: float
    """Mean over global batches of the median over rounds."""
    measured_sd: float
    """Over global batches; 0 where there is one."""
    measured_of_batch: tuple[float, ...]
    noise_frac: float
    """Half the range over rounds of one batch's ratio, relative; median over batches."""
    simulated: float
    profiled: float
    replayed: float
    replayed_cpu: float
    """As `replayed`, with thread CPU seconds: what it would be were nobody else on these cores."""


@dataclass(frozen=True)
class Outcome:
    """One case."""

    case: Case
    num_batches: int
    num_rounds: int
    encoder_frac: float | None
    """Of the CPU seconds of forward and backward; None where processes run whole models."""
    cpu_frac: float
    """Of the wall seconds of forward and backward, those on a core: below 1, others ran there, too."""
    compute_ratio: Mapping[str, float]
    """Predicted over measured CPU seconds of forward and backward, per module; of replicas, of the whole model."""
    replay_ratio: float
    """Step replayed from its own wall seconds over the measured one; median."""
    measured_tail_s: float
    simulated_tail_s: float
    policies: Mapping[str, Policy]
    ratios: Mapping[str, Ratio]

    @property
    def is_disturbed(self) -> bool:
        """Whether others ran on these cores so much that `measured` says little."""
        return self.cpu_frac < 0.95


@dataclass(frozen=True)
class _Seen:
    """One step as its processes saw it together."""

    step_s: float
    pipeline_s: float
    idle_frac: tuple[float, ...]
    wall_s: Durations
    compute_s: Durations

    @classmethod
    def of(cls, plan: Plan, ranks: Sequence[StepObservation]) -> _Seen:
        pipeline_s = max(o.step_s - o.reduce_s - o.optimizer_s for o in ranks)
        nothing = [(0.0, 0.0)] * plan.num_microbatches
        # Of an inline plan the LLM's spans are the whole chain's; its encoders have nothing to add.
        nodes = [(m.module, s, r) for m in plan.modules for s in range(m.parallel.pp) for r in range(m.parallel.dp)]
        wall_s, compute_s = ({node: list(nothing) for node in nodes} for _ in "12")
        for o in ranks:
            node = o.module, o.stage, o.dp_rank
            for s in o.spans:
                wall_s[node][s.microbatch] = s.forward_s, s.backward_s
                compute_s[node][s.microbatch] = s.forward_compute_s, s.backward_compute_s
        idle_frac = tuple(1 - o.busy_s / pipeline_s for o in ranks)
        return cls(max(o.step_s for o in ranks), pipeline_s, idle_frac, wall_s, compute_s)

    @property
    def tail_s(self) -> float:
        return self.step_s - self.pipeline_s


def compare(
    case: Case, costs: Costs, step_plans: Sequence[StepPlan], batches: Sequence[Sequence[SampleShape]],
    rounds: Sequence[Sequence[Sequence[StepObservation]]],
) -> Outcome:  # fmt: skip
    """What `[round][step][rank]` observations say; `step_plans` are those of `Costs.schedule`."""
    plan, num_policies = case.plan, len(case.policies)
    seen = [[_Seen.of(plan, ranks) for ranks in of_round] for of_round in rounds]
    every = [s for of_round in seen for s in of_round]
    predicted = [costs.durations(plan, p, batches[i // num_policies]) for i, p in enumerate(step_plans)]
    tail_s = costs.tail_s(case, batches[0])

    def replay(s: _Seen, step: int, durations: Durations) -> float:
        return simulated(plan, step_plans[step], durations).makespan_s + s.tail_s

    # [round, step]
    measured_s = np.array([[s.step_s for s in of_round] for of_round in seen])
    replayed_s = np.array([[replay(s, i, s.wall_s) for i, s in enumerate(of_round)] for of_round in seen])
    replayed_cpu_s = np.array([[replay(s, i, s.compute_s) for i, s in enumerate(of_round)] for of_round in seen])
    timelines = [simulated(plan, p, d) for p, d in zip(step_plans, predicted, strict=True)]
    simulated_s = np.array([[p.predicted_step_s + tail_s for p in step_plans]])
    profiled = [costs.uncorrected().durations(plan, p, batches[i // num_policies]) for i, p in enumerate(step_plans)]
    profiled_s = np.array(
        [[simulated(plan, p, d).makespan_s + tail_s for p, d in zip(step_plans, profiled, strict=True)]]
    )
    steps_of = {
        policy: np.array([i for i, p in enumerate(step_plans) if p.run_id == policy]) for policy in case.policies
    }

    def policy_figures(policy: str) -> Policy:
        steps = steps_of[policy]
        idle = np.array([[of_round[i].idle_frac for i in steps] for of_round in seen])
        busy = np.array([np.array(timelines[i].busy_s) / timelines[i].makespan_s for i in steps])
        return Policy(
            *(float(np.median(x[:, steps], axis=0).mean()) for x in (measured_s, simulated_s, replayed_s)),
            tuple(np.median(idle, axis=0).mean(axis=0).tolist()), tuple((1 - busy.mean(axis=0)).tolist()),
            num_kept_arrival=sum(step_plans[i].policy == "arrival" for i in steps),
        )  # fmt: skip

    def ratio(one: str, other: str) -> Ratio:
        def of(seconds: Floats) -> Floats:
            return seconds[:, steps_of[one]] / seconds[:, steps_of[other]]

        measured = of(measured_s)
        of_batch = np.median(measured, axis=0)
        others = (float(np.median(of(x), axis=0).mean()) for x in (simulated_s, profiled_s, replayed_s, replayed_cpu_s))
        return Ratio(
            float(of_batch.mean()), statistics.stdev(of_batch) if len(of_batch) > 1 else 0.0, tuple(of_batch.tolist()),
            float(np.median(np.ptp(measured, axis=0) / 2 / of_batch)), *others,
        )  # fmt: skip

    compute_s, predicted_s = _module_s(plan, [s.compute_s for s in every]), _module_s(plan, predicted)
    total_s = sum(compute_s.values())
    pairs = sorted(itertools.combinations(case.policies, 2), key=lambda pair: pair[1] != case.policies[-1])
    return Outcome(
        case, len(batches), len(rounds),
        encoder_frac=None if plan.is_inline else 1 - compute_s[LLM] / total_s,
        cpu_frac=total_s / sum(_module_s(plan, [s.wall_s for s in every]).values()),
        compute_ratio={name: len(rounds) * predicted_s[name] / found for name, found in compute_s.items()},
        replay_ratio=float(np.median(replayed_s / measured_s)),
        measured_tail_s=statistics.median(s.tail_s for s in every), simulated_tail_s=tail_s,
        policies={policy: policy_figures(policy) for policy in case.policies},
        ratios={f"{one} / {other}": ratio(one, other) for one, other in pairs},
    )  # fmt: skip


def _module_s(plan: Plan, steps: Sequence[Durations]) -> dict[str, float]:
    """Seconds of all steps by module; an inline plan's are all the LLM's, as they are measured."""
    found: dict[str, float] = {}
    for durations in steps:
        for (module, _, _), spans in durations.items():
            name = LLM if plan.is_inline else module
            found[name] = found.get(name, 0.0) + sum(forward + backward for forward, backward in spans)
    return found
