"""One seed of one case, measured: what each arm took, and whether all of them trained the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflop.jobs.steps import QUICK
from dflop.jobs.talk import Say
from dflop.records import Plan, StepObservation
from dflop.report.tables import layout_text
from tests.bench.correct.real_runs import compute_s, observations
from tests.bench.endtoend.arms import Arm, Contest, Profiled, make_contest
from tests.bench.endtoend.paired import relative_error
from tests.bench.endtoend.turns import Taken, take_turns

NUM_WARM_UP_STEPS = 3
"""First steps, not counted: heaps grow, and corrections have seen nothing."""
MAX_LOSS_ERROR = 1e-4
"""Of float32 sums in another order, over as many updates as are trained here."""


@dataclass(frozen=True)
class Case:
    """What is trained once."""

    data: str
    num_processes: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}, {self.num_processes} processes, seed {self.seed}"


def total_steps(num_counted: int) -> int:
    """Steps of a job of which so many are counted: warm-up before, and a last one that prepares no other."""
    return NUM_WARM_UP_STEPS + num_counted + 1


def measure(case: Case, profiled: Profiled, folder: Path, num_counted: int, say: Say) -> dict[str, Any]:
    """Train all arms of a case; figures for JSON.

    Raises:
        RuntimeError: a rank failed, or the arms did not train the same.
    """
    contest = make_contest(profiled, folder, case.seed, total_steps(num_counted), say)
    for arm in contest.arms:
        say(f"{case.name}: {arm.name}: {layout_text(arm.plan)}, {arm.plan.num_microbatches} microbatches")
    taken = take_turns(contest.arms, total_steps(num_counted), lambda line: say(f"{case.name}: {line}"))
    return figures(case, contest, taken, num_counted)


def figures(case: Case, contest: Contest, taken: Mapping[str, Taken], num_counted: int) -> dict[str, Any]:
    """What was seen, steps in order.

    Raises:
        RuntimeError: the arms did not train the same.
    """
    counted = range(NUM_WARM_UP_STEPS, NUM_WARM_UP_STEPS + num_counted)
    seen = {arm.name: observations(arm.run) for arm in contest.arms}
    losses = {name: [of[step, 0].loss for step in range(total_steps(num_counted))] for name, of in seen.items()}
    return asdict(case) | {
        "num_llm_tokens": [sum(s.num_llm_tokens for s in contest.batches[step]) for step in counted],
        "setup": asdict(contest.setup),
        "largest_loss_error": same_losses(losses),
        "losses": next(iter(losses.values())),
        "arms": {
            arm.name: _arm(arm, taken[arm.name], seen[arm.name], counted, case.num_processes) for arm in contest.arms
        },
    }


def same_losses(losses: Mapping[str, Sequence[float]]) -> float:
    """Largest relative difference of any arm's losses from the first one's, over all steps.

    Raises:
        RuntimeError: it is beyond rounding.
    """
    first, *others = losses.values()
    errors = [relative_error(first, other) for other in others]
    if not all(error <= MAX_LOSS_ERROR for error in errors):  # NaN is not, either
        raise RuntimeError(f"the arms did not train the same, their losses differ by {errors}: {dict(losses)}")
    return max(errors, default=0.0)


def _arm(
    arm: Arm,
    taken: Taken,
    seen: Mapping[tuple[int, int], StepObservation],
    counted: Sequence[int],
    num_processes: int,
) -> dict[str, Any]:
    ranks = range(arm.plan.num_processes)
    turns = [taken.turns[step - 1] for step in counted]  # the first step is nobody's turn
    of_step = [[seen[step, rank] for rank in ranks] for step in counted]
    return {
        "plan": _plan(arm.plan),
        "step_s": [t.wall_s for t in turns],
        "cpu_s": [t.cpu_s for t in turns],
        "simulated_s": [arm.simulated_s[step] for step in counted],
        "idle_frac": [
            idle_frac(sum(map(compute_s, of)), turn.wall_s, num_processes)
            for of, turn in zip(of_step, turns, strict=True)
        ],
        "num_quick_plans": sum(of[0].policy == QUICK for of in of_step),
        "peak_bytes": list(taken.peak_bytes),
    }  # fmt: skip


def idle_frac(busy_s: float, wall_s: float, num_processes: int) -> float:
    """Share of the processor time that processes could have had and in which they did not run forward or backward.

    Args:
        busy_s: Processor seconds in forward and backward, all processes.
        wall_s: Seconds of the step.
        num_processes: That a plan may have, all or not: each could have a core, as long as there are any.
    """
    return 1.0 - busy_s / (wall_s * min(num_processes, os.cpu_count() or 1))


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "plan_id": plan.plan_id,
        "layout": layout_text(plan),
        "num_microbatches": plan.num_microbatches,
        "num_processes": plan.num_processes,
    }
