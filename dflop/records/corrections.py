"""How far predictions are off: by size of item, and by rank."""

from __future__ import annotations

from dataclasses import dataclass

ALL_TOKENS = 2**53
"""More tokens than any item has."""


@dataclass(frozen=True, slots=True)
class ModuleFactors:
    """What multiplies a module's predicted seconds, by the size of its items (samples of the LLM, media items)."""

    module: str
    level: float
    """Factor for a typical mix of items; for loads that are not known item by item."""
    edges: tuple[int, ...] = ()
    """Tokens at which the next bucket of sizes begins, ascending; none: one bucket."""
    factors: tuple[float, ...] = (1.0,)
    """One per bucket."""


@dataclass(frozen=True, slots=True)
class NodeFactor:
    """What multiplies all predicted seconds of the ranks at one place of a plan: more than 1 where they are slow."""

    module: str
    stage: int
    dp_rank: int
    factor: float


@dataclass(frozen=True, slots=True)
class Factors:
    """All factors that a StepPlan is made with; what has none is taken as predicted."""

    modules: tuple[ModuleFactors, ...] = ()
    nodes: tuple[NodeFactor, ...] = ()

    def by_module(self) -> dict[str, ModuleFactors]:
        """As `CostModel` takes them."""
        return {found.module: found for found in self.modules}

    def by_node(self) -> dict[tuple[str, int, int], float]:
        """As the scheduler takes them."""
        return {(found.module, found.stage, found.dp_rank): found.factor for found in self.nodes}


@dataclass(frozen=True, slots=True)
class Correction:
    """What a run learnt about a module's predicted seconds for items of certain sizes.

    All buckets of a module are written together: rows that agree in all but tokens and factor are one set.
    """

    run_id: str
    effective_step: int
    module: str
    table_id: str
    factor: float
    residual_frac: float
    """Median absolute relative error of the uncorrected prediction in the window."""
    num_observations: int
    """Microbatches that the factor was learnt from."""
    observed_at_s: float
    min_tokens: int = 0
    """Fewest tokens of an item in this bucket."""
    max_tokens: int = ALL_TOKENS
    """First number of tokens beyond the bucket."""
    sd_frac: float = 0.0
    """Standard deviation of the factor, in units of the prediction."""
    is_in_force: bool = True
    """Whether plans are made with this factor; else with the module's level, or with 1."""
    level: float = 1.0
    """Factor of the module's typical mix."""


@dataclass(frozen=True, slots=True)
class RankFactor:
    """How much longer a rank takes for the same work than its peers do."""

    run_id: str
    attempt: int
    effective_step: int
    rank: int
    module: str
    stage: int
    dp_rank: int
    host: str
    factor: float
    sd_frac: float
    is_in_force: bool
    observed_at_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that was noticed and what was done about it, with the numbers it was decided on."""

    run_id: str
    attempt: int
    step: int
    """At which it was noticed; decisions between two jobs: the first step of the next."""
    kind: str
    """`drift_cost`, `drift_shapes`, `slow_rank`, `rescale`, `reprofile`, `replan` or `stage`."""
    subject: str
    """Module with its bucket of sizes, rank, or plan."""
    verdict: str
    """`noticed`, `done`, `stay`, `advised` (what would be done, were it allowed) or `failed`."""
    measured: float
    """In the units that `detail` names; NaN where there is nothing to measure."""
    expected: float
    gain_s: float
    """Expected over the steps that are left; NaN where no gain was reckoned."""
    cost_s: float
    num_steps_left: int
    plan_id: str
    """The plan that ran."""
    new_plan_id: str
    """The plan that runs from now on, or would; empty where none was looked for."""
    detail: str
    """In words, with figures."""
    observed_at_s: float
