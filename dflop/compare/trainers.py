"""What trainers would take for the same global batches of one's own data: rows of `dflop compare`. All simulated."""

from __future__ import annotations

from collections.abc import Sequence

from dflop.compare.outlook import Outlook
from dflop.compare.suite.cases import Setting
from dflop.compare.suite.contest import BATCHES, DEFAULT, GROUPED, OURS, REFERENCE, TOKEN_LPT, TUNED, Contest, contest
from dflop.compare.suite.savings import savings
from dflop.data.distribution import sample_batches
from dflop.plan.drafts import holding
from dflop.records import Plan
from dflop.report.tables import layout_text
from dflop.run.messages import Say

COLUMNS = (
    "what", "layout", "microbatches", "step_s", "speedup", "speedup_low", "speedup_high", "idle_frac", "gpu_hours",
    "usd",
)  # fmt: skip
"""Speed-ups are over the tuned uniform plan, geometric means over batches with their 95 % interval."""
BOUND = "perfect balance, no bubble"


def compare_on_data(outlook: Outlook, num_batches: int, seed: int, say: Say) -> Contest:
    """Plans everything and judges it on batches drawn anew.

    Raises:
        InfeasiblePlanError: nothing fits in memory, or no uniform plan does.
    """
    problem = outlook.problem
    unseen = sample_batches(outlook.shapes, problem.global_batch_size, num_batches, seed)
    return contest(Setting("your data", "your data", problem, tuple(unseen), outlook.source), say)


def comparison_rows(found: Contest, num_steps: int, usd_per_gpu_hour: float) -> list[tuple[object, ...]]:
    """Rows of `COLUMNS`, the data-blind ones first; competitors without a plan are left out."""
    ours, tuned = found.plans.ours, found.plans.tuned
    competitors: Sequence[tuple[str, str, Plan | None]] = (
        (DEFAULT, "uniform, default", found.plans.default),
        (TUNED, "uniform, tuned", tuned),
        (GROUPED, "uniform, length-grouped", tuned),
        (TOKEN_LPT, "LPT on LLM tokens, on the better of tuned and dflop", None),
        (BATCHES, "uniform, our batches", tuned),
        (REFERENCE, "reference's plan, balanced", found.plans.reference),
        (OURS, "dflop", ours),
    )
    rows = [
        _row(found, key, name, plan, num_steps, usd_per_gpu_hour)
        for key, name, plan in competitors
        if key in found.steps
    ]
    mean_s = sum(found.bound_s) / len(found.bound_s)
    cost = savings(mean_s, mean_s, num_steps, found.setting.num_gpus, usd_per_gpu_hour)
    spent = (cost.baseline_gpu_hours, cost.baseline_gpu_hours * usd_per_gpu_hour)
    return [*rows, (BOUND, "", None, mean_s, found.bound_speedup, None, None, 0.0, *spent)]


def _row(
    found: Contest, key: str, name: str, plan: Plan | None, num_steps: int, usd_per_gpu_hour: float
) -> tuple[object, ...]:
    steps, speedup = found.steps[key], found.speedup(key)
    assert speedup is not None, key
    cost = savings(steps.mean_s, steps.mean_s, num_steps, found.setting.num_gpus, usd_per_gpu_hour)
    judged = (plan,) if plan else (found.plans.ours, found.plans.tuned)
    is_over = steps.num_over_cap > 0 or all(holding(found.setting.problem, p) is None for p in judged)
    over = " (exceeds memory)" * is_over
    return (
        name + over, layout_text(plan) if plan else "", plan.num_microbatches if plan else None, steps.mean_s,
        speedup.mean, speedup.low, speedup.high, steps.mean_idle_frac, cost.baseline_gpu_hours,
        cost.baseline_gpu_hours * usd_per_gpu_hour,
    )  # fmt: skip
