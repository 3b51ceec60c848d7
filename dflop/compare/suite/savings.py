"""What faster steps are worth in GPU-hours and money."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Savings:
    """Of a run of so many steps; simulated where the step times are."""

    baseline_gpu_hours: float
    ours_gpu_hours: float
    usd_per_gpu_hour: float

    @property
    def saved_gpu_hours(self) -> float:
        """Negative where ours is slower."""
        return self.baseline_gpu_hours - self.ours_gpu_hours

    @property
    def saved_usd(self) -> float:
        return self.saved_gpu_hours * self.usd_per_gpu_hour


def savings(
    step_s_baseline: float, step_s_ours: float, num_steps: int, num_gpus: int, usd_per_gpu_hour: float
) -> Savings:
    """Savings of a run.

    Args:
        step_s_baseline: Mean seconds of a step.
        step_s_ours: Likewise.
        num_steps: Optimizer steps of the run.
        num_gpus: GPUs that are paid for, whether a plan uses them or not.
        usd_per_gpu_hour: Price.

    Raises:
        ValueError: a number is negative or no number.
    """
    given = (step_s_baseline, step_s_ours, num_steps, num_gpus, usd_per_gpu_hour)
    if not all(0 <= value < float("inf") for value in given):
        raise ValueError(f"savings of {given}: every number must be finite and not negative")
    gpu_hours_per_s = num_steps * num_gpus / 3600
    return Savings(step_s_baseline * gpu_hours_per_s, step_s_ours * gpu_hours_per_s, usd_per_gpu_hour)
