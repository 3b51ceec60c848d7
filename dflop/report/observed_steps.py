"""The observations of all ranks, put back together into optimizer steps.

A rank reports what it saw; a step takes as long as its slowest rank. A step repeated after a restart counts once, as
its last attempt. `pipeline_s` is what the simulator predicts: forward and backward of all microbatches, without
gradient reduction and optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflop.records import LLM, StepObservation


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One optimizer step as all its ranks measured it."""

    step: int
    policy: str
    ranks: tuple[StepObservation, ...]
    """Ascending by rank, at least one."""

    @property
    def step_s(self) -> float:
        """Seconds of the slowest rank."""
        return max(r.step_s for r in self.ranks)

    @property
    def pipeline_s(self) -> float:
        """Forward and backward only, of the slowest rank."""
        return max(r.step_s - r.reduce_s - r.optimizer_s for r in self.ranks)

    @property
    def predicted_step_s(self) -> float:
        """Simulated counterpart of `pipeline_s`; every rank was sent the same."""
        return self.ranks[0].predicted_step_s

    @property
    def data_wait_s(self) -> float:
        """Wait for media and step plan before the step, which `step_s` does not include."""
        return max(r.data_wait_s for r in self.ranks)

    @property
    def idle_frac(self) -> float:
        """Share of process time outside forward and backward; NaN for a step of no length."""
        available_s = len(self.ranks) * self.step_s
        return 1.0 - sum(r.busy_s for r in self.ranks) / available_s if available_s > 0 else math.nan

    @property
    def loss(self) -> float | None:
        """Mean loss over the supervised tokens of the global batch, the same on every rank; NaN if it diverged.

        None where all samples were lost.
        """
        return self.ranks[0].loss if self.ranks[0].num_supervised_tokens else None

    @property
    def llm_tokens_per_s(self) -> float:
        """NaN when the spans carry no token counts, as in steps that ran without the scheduler."""
        per_dp_rank: dict[int, int] = {}
        for r in self.ranks:
            if r.module == LLM and r.stage == 0:
                # The ranks of a tensor-parallel group see the same tokens: one of them speaks for the group.
                seen = sum(span.num_tokens for span in r.spans)
                per_dp_rank[r.dp_rank] = max(seen, per_dp_rank.get(r.dp_rank, 0))
        num_tokens = sum(per_dp_rank.values())
        return num_tokens / self.step_s if num_tokens and self.step_s > 0 else math.nan


def measured_steps(observations: Sequence[StepObservation]) -> tuple[MeasuredStep, ...]:
    """Steps in ascending order; of a repeated step only the last attempt.

    Args:
        observations: Of one job (training or comparison), in any order.
    """
    attempts: dict[int, dict[int, dict[int, StepObservation]]] = {}
    for seen in observations:
        attempts.setdefault(seen.step, {}).setdefault(seen.attempt, {})[seen.rank] = seen
    found = []
    for step, of_attempt in sorted(attempts.items()):
        ranks = of_attempt[max(of_attempt)]
        ordered = tuple(ranks[r] for r in sorted(ranks))
        found.append(MeasuredStep(step, ordered[0].policy, ordered))
    return tuple(found)
