"""The best plan with processes of their own per module for data without variance: every sample is the mean sample.

What a per-module planner finds that is told averages. Layouts, costs, formula and memory are ours, so that what is
lost to the planner proper is lost to not knowing how samples differ. Memory is that of the real data: whoever runs
such a plan learns of it with the first step that fails.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dflop.cost.model import Floats
from dflop.errors import InfeasiblePlanError
from dflop.plan.columns import Columns
from dflop.plan.drafts import draft
from dflop.plan.grid_search import grids_apart
from dflop.plan.program import optimum
from dflop.plan.scenarios import ScenarioLoads, scenario_loads
from dflop.plan.space import Problem
from dflop.records import LLM, ModuleSpec, Plan


def blind_plan(problem: Problem) -> Plan:
    """The formula's best split plan on mean shapes, as a plan for the real data.

    Raises:
        CostError: a module without costs.
        InfeasiblePlanError: no split plan fits.
    """
    mean = MeanProblem(*(getattr(problem, field.name) for field in dataclasses.fields(problem)))
    mean = dataclasses.replace(
        mean, space=dataclasses.replace(problem.space, share_ranks=(False,), shard_parameters=(False,))
    )
    names, num_processes = [spec.module for spec in problem.specs], problem.cluster.num_processes
    best, known_s = None, math.inf
    for m in problem.microbatch_choices:
        columns = Columns.of(names, m, num_processes, grids_apart(mean, m, known_s))
        found = optimum(columns, m, known_s, 1, ratio=1.0).found
        if columns is not None and found:
            (known_s, cover), *_ = found
            best = m, columns.choices(cover)
    if best is None:
        raise InfeasiblePlanError("no plan with processes of their own per module fits in memory")
    return draft(problem, *best, known_s)


class MeanProblem(Problem):
    """A problem whose times are those of one batch of mean samples."""

    @cached_property
    def loads(self) -> dict[str, ScenarioLoads]:
        return {
            s.module: mean_loads(scenario_loads(self.batches, s.module, worst=self.worst_batches)) for s in self.specs
        }

    @cached_property
    def sample_loads(self) -> dict[str, ScenarioLoads]:
        return self.loads

    def heaviest_units(self, specs: Sequence[ModuleSpec]) -> dict[str, Floats]:
        return {spec.module: self.loads[spec.module].longest for spec in specs}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoads(ScenarioLoads):
    """One batch of equal units; the largest microbatch stays that of the real ones."""

    real: ScenarioLoads

    def largest(self, num_buckets: npt.ArrayLike) -> Floats:
        return self.real.largest(num_buckets)


def mean_loads(real: ScenarioLoads) -> MeanLoads:
    """As many units as a batch has on average, each of mean size; a sample of the LLM is one sequence."""
    total = real.total.mean(axis=1, keepdims=True)
    num_units = max(1, round(float(real.num_units.mean())))
    if real.module == LLM:
        total[2] = total[1] ** 2 / num_units
    return MeanLoads(
        module=real.module, total=total, longest=total / num_units, num_units=np.array([num_units], dtype=np.int64),
        units=(), lengths=(), real=real,
    )  # fmt: skip
