"""How far each module's predicted seconds are off, by size of item and by rank, learnt from what a run measures.

Factors multiply uncorrected predictions. Those of modules that share stages are learnt together (`filter.py`): every
microbatch mixes modules and sizes differently, which separates them. Slow ranks are not mistaken for slow sizes:
a rank's times are divided by its factor, and ranks are compared after the sizes are corrected (`nodes.py`).

What is believed and what should be applied differ: acting on noise costs more than it gains. A module's level stays
within 3 % of what is in force. What sizes deviate by from it is shrunk by what chance would give all of them together
(James and Stein), so that where predictions are right nothing is left; what is left of a bucket is applied beyond 3 %.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from dflop.correct.buckets import bucket_of, typical_tokens
from dflop.correct.filter import (
    DRIFT_BUCKET,
    DRIFT_LEVEL,
    MAD_TO_SD,
    SD_BUCKET,
    SD_LEVEL,
    FactorFilter,
    common_mean,
    hierarchical,
)
from dflop.correct.nodes import NodeBelief, NodeFactors
from dflop.correct.noise import SharedNoise
from dflop.correct.times import Ints, StepTimes, medians, sums
from dflop.cost.model import Floats
from dflop.records import Factors, ModuleFactors, NodeFactor
from dflop.simulate.step import Node

DEAD_ZONE_FRAC = 0.03
NUM_SD = 1.0
"""Standard deviations by which a bucket must differ from its module's level to get a separate factor."""
NUM_CHANCE = 2.0
"""Times the squared deviations, in their uncertainty, that chance gives: so much of all of them is left out."""
NUM_SD_LEVEL = 3.0
"""The same for a level to move: every step without a reason to is one that two modules do not get out of balance."""
SD_UNKNOWN = math.hypot(SD_BUCKET, SD_LEVEL)
"""Uncertainty of a factor without any observation."""
MEDIAN_TO_MEAN_SD = 1.25
"""Standard deviation of a median in that of a mean, about."""
WINDOW_STEPS = 32
"""Steps over which the error of the uncorrected prediction is reported."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a module before the first step, from earlier runs; by default that predictions may be right."""

    edges: tuple[int, ...] = ()
    """Edges of that run's buckets; ours may differ."""
    factors: tuple[float, ...] = (1.0,)
    sd: tuple[float, ...] = (SD_UNKNOWN,)
    """Standard deviation of each factor; counts for no more than that of the default."""
    level: float = 1.0


@dataclass(frozen=True, slots=True)
class Belief:
    """What is known of a module."""

    level: float
    """Factor of its typical mix of items."""
    level_sd: float
    factors: tuple[float, ...]
    """Per bucket, as learnt: more than one should act on."""
    sd: tuple[float, ...]
    num_observations: int
    """Microbatches learnt from."""
    residual_frac: float
    """Median absolute relative error of the uncorrected prediction in the last steps; NaN before the first."""


@dataclass(slots=True)
class _Module:
    """What is kept of a module besides its filter."""

    edges: tuple[int, ...]
    level: float
    """In force."""
    num_observations: int = 0
    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """Per step."""


class Estimator:
    """Learns factors from stage times.

    Args:
        edges: Tokens at which buckets begin, per module that may be corrected.
        shared: Groups of modules that are together on some stage; what is in none has its stages to itself.
        prior: What earlier runs learnt.
    """

    def __init__(
        self,
        edges: Mapping[str, tuple[int, ...]],
        shared: Sequence[Collection[str]] = (),
        prior: Mapping[str, Prior] | None = None,
    ) -> None:
        known = {module: (prior or {}).get(module, Prior()) for module in edges}
        self._modules = {module: _Module(tuple(found), known[module].level) for module, found in edges.items()}
        joint = [tuple(m for m in edges if m in group) for group in shared]
        alone = [(m,) for m in edges if not any(m in group for group in joint)]
        self._filters = {group: self._new_filter(group, known) for group in [*joint, *alone] if group}
        self._shared = {group: SharedNoise() for group in self._filters}
        self._group_of = {module: group for group in self._filters for module in group}
        self._columns = {
            module: slice(end - len(self._modules[module].edges) - 1, end)
            for group in self._filters
            for module, end in zip(group, accumulate(len(self._modules[m].edges) + 1 for m in group), strict=True)
        }
        self._nodes = NodeFactors()

    def observe(self, times: StepTimes) -> None:
        """Learn from one step. The caller leaves out the first step of an attempt, which is slow everywhere.

        Args:
            times: In any order, of modules this estimator knows; what is not a positive number of seconds, measured and
                predicted, is passed over.
        """
        is_measured = (times.measured_s > 0) & np.isfinite(times.measured_s)
        for group, found in self._filters.items():
            expected_s = times.table({m: len(self._modules[m].edges) + 1 for m in group})
            usable = is_measured & expected_s.any(axis=1)
            if usable.any():
                self._learn(group, found, times.rows(usable), expected_s[usable])

    def factors(self) -> Factors:
        """What should be applied."""
        return Factors(
            tuple(self._module_factors(module) for module in self._modules),
            tuple(
                NodeFactor(*node, belief.in_force)
                for node, belief in self._nodes.beliefs().items()
                if belief.in_force != 1.0
            ),
        )

    def beliefs(self) -> dict[str, Belief]:
        """What is known of each module."""
        return {
            module: Belief(
                level=level,
                level_sd=level_sd,
                factors=tuple(mean.tolist()),
                sd=tuple(np.sqrt(np.diag(cov)).tolist()),
                num_observations=kept.num_observations,
                residual_frac=statistics.median(kept.window) if kept.window else math.nan,
            )
            for module, kept in self._modules.items()
            for mean, cov in [self._marginal(module)]
            for level, level_sd, _ in [common_mean(mean, cov)]
        }

    def node_beliefs(self) -> dict[Node, NodeBelief]:
        """What is known of the ranks at each place of the plan; nothing where a module has one place only."""
        return self._nodes.beliefs()

    def state(self) -> dict[str, Any]:
        """Everything that was learnt, for JSON."""
        return {
            "modules": {
                module: [list(m.edges), m.level, m.num_observations, list(m.window)]
                for module, m in self._modules.items()
            },
            "filters": [[list(group), found.state()] for group, found in self._filters.items()],
            "shared": [[list(group), found.state()] for group, found in self._shared.items()],
            "nodes": self._nodes.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        for group, found in state["filters"]:
            self._filters[tuple(group)].load(found)
        for group, found in state["shared"]:
            self._shared[tuple(group)].load(found)
        for module, (_, level, num_observations, window) in state["modules"].items():
            kept = self._modules[module]
            kept.level, kept.num_observations = level, num_observations
            kept.window = deque(window, maxlen=WINDOW_STEPS)
        self._nodes.load(state["nodes"])

    def _new_filter(self, group: tuple[str, ...], known: Mapping[str, Prior]) -> FactorFilter:
        """Filter over the factors of all modules of a group, which are unrelated before the first step."""
        means, covs, priors, drifts = [], [], [], []
        for module in group:
            prior, edges = known[module], self._modules[module].edges
            bucket = bucket_of(typical_tokens(edges), prior.edges)
            default = hierarchical(len(bucket), SD_BUCKET, SD_LEVEL)
            scale = np.minimum(np.array(prior.sd)[bucket] / SD_UNKNOWN, 1.0)
            means.append(np.array(prior.factors)[bucket])
            covs.append(default * np.outer(scale, scale))
            priors.append(default)
            drifts.append(hierarchical(len(bucket), DRIFT_BUCKET, DRIFT_LEVEL))
        return FactorFilter(np.concatenate(means), *(_block_diagonal(blocks) for blocks in (covs, priors, drifts)))

    def _learn(self, group: tuple[str, ...], found: FactorFilter, times: StepTimes, expected_s: Floats) -> None:
        """One step of modules that are learnt together."""
        measured_s, shared = times.measured_s, self._shared[group]
        self._compare_nodes(times, expected_s, found, shared, by_stage=len(group) > 1)
        taken = np.array([self._nodes.taken(node) for node in times.nodes])
        found.update(expected_s, measured_s / taken[times.node], times.node, shared.var)
        error = np.abs(expected_s.sum(axis=1) / measured_s - 1.0)
        for module in group:
            has_work = expected_s[:, self._columns[module]].any(axis=1)
            if has_work.any():
                kept = self._modules[module]
                kept.num_observations += int(has_work.sum())
                kept.window.append(float(np.median(error[has_work])))
                level, level_sd, _ = common_mean(*self._marginal(module))
                if abs(level - kept.level) > max(NUM_SD_LEVEL * level_sd, DEAD_ZONE_FRAC * kept.level):
                    kept.level = level

    def _compare_nodes(
        self, times: StepTimes, expected_s: Floats, found: FactorFilter, shared: SharedNoise, by_stage: bool
    ) -> None:
        """Ranks with their peers, by logarithms of measured to predicted seconds."""
        predicted_s = expected_s @ found.mean
        logs = np.log(times.measured_s / predicted_s)
        num = np.bincount(times.node, minlength=len(times.nodes))
        middle = medians(logs, times.node, len(num))
        away = np.abs(logs - middle[times.node])
        mix = _means(expected_s / predicted_s[:, None], times.node, len(num))
        peers: dict[tuple[str | int, ...], list[int]] = {}
        for i in np.flatnonzero(num).tolist():
            peers.setdefault(times.nodes[i][: 2 if by_stage else 1], []).append(i)
        peer_of = np.zeros(len(num), dtype=np.int64)
        for number, seen in enumerate(peers.values()):
            peer_of[seen] = number
        usual_away = medians(away, peer_of[times.node], len(peers)).tolist()
        middles: dict[Node, tuple[float, float]] = {}
        for seen, typical in zip(peers.values(), usual_away, strict=True):
            spread = MEDIAN_TO_MEAN_SD * MAD_TO_SD * typical
            own_var = spread**2 / np.maximum(num, 1)
            middles |= {times.nodes[i]: (float(middle[i]), float(own_var[i])) for i in seen}
            # A rank that had more of sizes that nobody is sure of may differ for that.
            other = mix[seen] - mix[seen].mean(axis=0)
            unsure_var = np.einsum("ij,ij->i", other @ found.cov, other)
            sd = np.sqrt(own_var[seen] + shared.var + unsure_var).tolist()
            self._nodes.observe({times.nodes[i]: (float(middle[i]), s) for i, s in zip(seen, sd, strict=True)})
        shared.observe(middles)

    def _marginal(self, module: str) -> tuple[Floats, Floats]:
        """(mean, covariance) of one module's factors."""
        found, here = self._filters[self._group_of[module]], self._columns[module]
        return found.mean[here], found.cov[here, here]

    def _module_factors(self, module: str) -> ModuleFactors:
        kept = self._modules[module]
        mean, cov = self._marginal(module)
        level, _, sd = common_mean(mean, cov)
        away = mean - level
        evidence = max(float(away @ np.linalg.solve(cov, away)), 1e-300)
        left = away * max(0.0, 1.0 - NUM_CHANCE * (len(mean) - 1) / evidence)
        differs = (np.abs(away) > NUM_SD * sd) & (np.abs(left) > DEAD_ZONE_FRAC)
        return ModuleFactors(
            module, kept.level, kept.edges, tuple(np.where(differs, level + left, kept.level).tolist())
        )


def _means(rows: Floats, group: Ints, num: int) -> Floats:
    """`[num, K]` mean of the rows of each group; zeros of one without any."""
    found: Floats = sums(rows, group, num) / np.maximum(np.bincount(group, minlength=num), 1)[:, None]
    return found


def _block_diagonal(blocks: Sequence[Floats]) -> Floats:
    size = sum(len(block) for block in blocks)
    found, at = np.zeros((size, size)), 0
    for block in blocks:
        found[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    return found
