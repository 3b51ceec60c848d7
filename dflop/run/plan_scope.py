"""What a plan was made for: which steps' batches, which frozen modules, which corrections. Kept beside the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflop import files
from dflop.config import Config
from dflop.cost.terms import Term
from dflop.data.distribution import sample_batches
from dflop.records import ModuleFactors, SampleShape, from_dict, parse_json, to_dict
from dflop.run.batches import GlobalBatches, stage_at
from dflop.run.directory import RunDir
from dflop.units import ratio

Batches = tuple[tuple[SampleShape, ...], ...]
FILE_NAME = "plan_basis.json"
MIN_REPORTED_FRAC = 0.03
"""Factors nearer to 1 are not worth words."""


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """What a plan was made for."""

    plan_id: str
    from_step: int
    num_steps: int
    """Whose batches it was made for; 0: random batches of all samples."""
    frozen: tuple[str, ...]
    factors: tuple[ModuleFactors, ...]
    """Corrections that its costs were multiplied with."""
    terms: tuple[Term, ...] = ()
    """What its modules and messages cost, before corrections; empty in files from before they were kept."""


def basis_of(run: RunDir) -> PlanBasis:
    """What the run's plan was made for; of a plan that was written by hand, all samples and no corrections."""
    plan_id, config = run.plan().plan_id, run.config()
    try:
        found = from_dict(PlanBasis, parse_json((run.path / FILE_NAME).read_bytes()))
    except (OSError, ValueError, TypeError):
        found = None
    if found is None or found.plan_id != plan_id:
        return PlanBasis(plan_id, 0, 0, stage_at(config, 0).frozen, ())
    return found


def write_basis(run: RunDir, basis: PlanBasis) -> None:
    """Keeps it beside the plan; to be written before the plan itself."""
    files.replace(run.path / FILE_NAME, json.dumps(to_dict(basis), indent=2), is_durable=True)


def planned_steps(config: Config, from_step: int | None) -> tuple[int, int]:
    """(first step, number of steps) that a plan is to be made for; (0, 0) stands for all samples.

    Without a horizon a plan is for all that is left of the stage; without `from_step` it is made before anything runs.
    """
    horizon = config.plan.horizon_steps
    if from_step is None and not horizon:
        return 0, 0
    first = from_step or 0
    left = max(1, stage_at(config, first).end_step - first)
    return first, min(horizon, left) if horizon else left


def scenario_batches(
    config: Config, shapes: Sequence[SampleShape], from_step: int, num_steps: int, num_batches: int | None = None
) -> Batches:
    """Global batches that stand for steps: those that the run will draw, evenly spread, or (of 0 steps) random ones.

    At most `num_batches`, or as many as the configuration's `plan.num_scenarios`.

    Raises:
        DataError: there are no shapes.
    """
    num_batches = num_batches or config.plan.num_scenarios
    if not num_steps:
        return tuple(sample_batches(shapes, config.plan.global_batch_size, num_batches, config.train.seed))
    drawn = GlobalBatches(config, shapes)
    count = min(num_batches, num_steps)
    steps = [from_step + (2 * i + 1) * num_steps // (2 * count) for i in range(count)]
    found = [tuple(drawn.at(step)) for step in steps]
    # The last batch of an epoch may be a small one, which says little about a step.
    longest = max(len(batch) for batch in found)
    return tuple(batch for batch in found if 2 * len(batch) > longest)


def factors_text(factors: Mapping[str, ModuleFactors]) -> str:
    """Corrections in a few words, empty where there are none to speak of."""
    corrections = []
    for module, found in sorted(factors.items()):
        low, high = min(found.factors), max(found.factors)
        if max(abs(f - 1) for f in (found.level, low, high)) > MIN_REPORTED_FRAC:
            is_spread = high > low * (1 + MIN_REPORTED_FRAC)
            by_size = f" ({ratio(low)} to {ratio(high)} by size)" if is_spread else ""
            corrections.append(f"`{module}` {ratio(found.level)}{by_size}")
    return f"Costs include corrections from earlier steps: {', '.join(corrections)}." if corrections else ""
