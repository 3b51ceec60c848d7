"""All that a job knows of how far predictions are off; it outlives its scheduler process, the job, and its plan.

Under the same plan the whole state is kept. Another plan gives ranks other work: then factors of a module are kept if
its cost table is the same, and are read from the store if it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflop.correct.estimate import Estimator, Prior
from dflop.learn.cost_inputs import LEAST_PRIOR_SD
from dflop.learn.decisions import JobFacts
from dflop.records import Plan

STATE_VERSION = 3


class LearnedState:
    """The estimator of one job, with the edges of buckets per module of its plan.

    `learned` is what `state` gave before; anything else is not used.
    """

    def __init__(
        self, job: JobFacts, edges: Mapping[str, tuple[int, ...]], earlier: Mapping[str, Prior],
        learned: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._plan, self.edges, self._table_ids = job.plan, dict(edges), dict(job.table_ids)
        state = learned if learned and learned.get("version") == STATE_VERSION else {}
        self.estimator = Estimator(edges, groups(job.plan), {**earlier, **self._priors(state)})
        mine = [job.plan.plan_id, self._table_ids, {module: list(found) for module, found in edges.items()}]
        if state and [state["plan_id"], state["tables"], state["edges"]] == mine:  # left by the same plan and data
            self.estimator.load(state["estimator"])

    def state(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "version": STATE_VERSION,
            "plan_id": self._plan.plan_id,
            "tables": self._table_ids,
            "edges": {module: list(edges) for module, edges in self.edges.items()},
            "beliefs": {m: [list(b.factors), list(b.sd), b.level] for m, b in self.estimator.beliefs().items()},
            "estimator": self.estimator.state(),
        }

    def _priors(self, state: Mapping[str, Any]) -> dict[str, Prior]:
        """What a state says of modules whose cost table is still the same."""
        priors = {}
        for module, (factors, sd, level) in (state["beliefs"] if state else {}).items():
            if state["tables"][module] == self._table_ids.get(module):
                sds = tuple(max(s, LEAST_PRIOR_SD) for s in sd)
                priors[module] = Prior(tuple(state["edges"][module]), tuple(factors), sds, level)
        return priors


def groups(plan: Plan) -> list[tuple[str, ...]]:
    """Modules that share stages."""
    return [tuple(m.module for m in grid) for grid in plan.grids]
