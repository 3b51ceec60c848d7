"""What a run says of what it learns: a row when something has changed by so much that somebody should know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dflop.correct.estimate import Belief
from dflop.correct.nodes import NodeBelief
from dflop.cost.model import CostModel
from dflop.parallel.topology import rank_of
from dflop.records import ALL_TOKENS, Correction, Decision, Factors, ModuleFactors, Plan, RankFactor
from dflop.simulate.step import Node

NEWS_FRAC = 0.03
"""Change of a factor since it was last written that is worth writing it again."""
RESCALE_FRAC = 0.1
"""Change of a module's level that is recorded as a decision."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What rows name, and how steps are packed and judged."""

    run_id: str
    attempt: int
    plan: Plan
    table_ids: Mapping[str, str]
    """Cost table in use, per module."""
    num_steps: int
    host_of: Callable[[int], str]
    """Name of the machine of a rank."""
    cost: CostModel
    """Uncorrected."""
    max_concurrency: int | None


class Findings:
    """Remembers what was recorded last; takes the factors in force and beliefs at the start of a job."""

    def __init__(self, facts: JobFacts, applied: Factors, beliefs: Mapping[str, Belief]) -> None:
        self._facts = facts
        self._levels = {found.module: found.level for found in applied.modules}
        self._recorded = {
            found.module: _logs(found.factors, beliefs[found.module].factors) for found in applied.modules
        }
        self._ranks: dict[Node, tuple[float, bool]] = {}

    def corrections(
        self, effective_step: int, applied: Factors, beliefs: Mapping[str, Belief], now_s: float, *,
        all_of_them: bool = False,
    ) -> list[Correction]:  # fmt: skip
        """Sets of the modules of which something has moved by 3 %: a factor in force, or what is believed.

        They are planned with from `effective_step` on; factors and beliefs have the same buckets of sizes.
        """
        rows: list[Correction] = []
        for found in applied.modules:
            belief = beliefs[found.module]
            logs = _logs(found.factors, belief.factors)
            news = (
                abs(now - last) > math.log1p(NEWS_FRAC)
                for now, last in zip(logs, self._recorded[found.module], strict=True)
            )
            if all_of_them or any(news):
                self._recorded[found.module] = logs
                rows += self._set(found, belief, effective_step, now_s)
        return rows

    def rescaled(self, step: int, applied: Factors, now_s: float) -> list[Decision]:
        """Levels that have changed by a tenth."""
        rows = []
        for found in applied.modules:
            module, before = found.module, self._levels[found.module]
            if abs(math.log(found.level / before)) > math.log1p(RESCALE_FRAC):
                self._levels[module] = found.level
                detail = f"{module}: cost correction x{found.level:.2f} measured / predicted"
                detail += f", before: x{before:.2f}"
                rows.append(self.decision(step, "rescale", module, "done", found.level, before, detail, now_s))
        return rows

    def ranks(
        self, step: int, effective_step: int, applied: Factors, beliefs: Mapping[Node, NodeBelief], now_s: float
    ) -> list[RankFactor | Decision]:
        """Ranks whose factor in force has changed, and those that are slow from now on."""
        rows: list[RankFactor | Decision] = []
        by_node, facts = applied.by_node(), self._facts
        for node, belief in beliefs.items():
            factor, was_slow = self._ranks.get(node, (1.0, False))
            in_force = by_node.get(node, 1.0)
            is_moved = abs(math.log(in_force / factor)) > math.log1p(NEWS_FRAC)
            if not is_moved and belief.is_slow == was_slow:
                continue
            self._ranks[node] = (in_force if is_moved else factor, belief.is_slow)
            module, stage, dp_rank = node
            # Of the ranks that run microbatches together, all as slow as the slowest of them, the first.
            part = facts.plan.module(module)
            rank = rank_of(part, stage, dp_rank * part.parallel.cp)
            host = facts.host_of(rank)
            rows.append(
                RankFactor(
                    facts.run_id, facts.attempt, effective_step, rank, *node, host, belief.factor, belief.sd,
                    in_force != 1.0, now_s,
                )
            )  # fmt: skip
            if belief.is_slow and not was_slow:
                name = f"rank {rank} ({module} stage {stage} replica {dp_rank}{f' on {host}' if host else ''})"
                detail = f"{name} takes {belief.factor:.2f}x the time of its peers"
                rows.append(self.decision(step, "slow_rank", name, "noticed", belief.factor, 1.0, detail, now_s))
        return rows

    def decision(
        self, step: int, kind: str, subject: str, verdict: str, measured: float, expected: float, detail: str,
        now_s: float,
    ) -> Decision:  # fmt: skip
        """A decision that changes no plan."""
        facts = self._facts
        return Decision(
            facts.run_id, facts.attempt, step, kind, subject, verdict, measured, expected, math.nan, math.nan,
            facts.num_steps - step - 1, facts.plan.plan_id, "", detail, now_s,
        )  # fmt: skip

    def _set(self, applied: ModuleFactors, belief: Belief, effective_step: int, now_s: float) -> list[Correction]:
        """One row per bucket."""
        starts, ends = (0, *applied.edges), (*applied.edges, ALL_TOKENS)
        return [
            Correction(
                run_id=self._facts.run_id,
                effective_step=effective_step,
                module=applied.module,
                table_id=self._facts.table_ids[applied.module],
                factor=factor,
                residual_frac=belief.residual_frac,
                num_observations=belief.num_observations,
                observed_at_s=now_s,
                min_tokens=starts[bucket],
                max_tokens=ends[bucket],
                sd_frac=belief.sd[bucket],
                is_in_force=applied.factors[bucket] != applied.level,
                level=applied.level,
            )
            for bucket, factor in enumerate(belief.factors)
        ]


def _logs(*factors: Iterable[float]) -> list[float]:
    return [math.log(factor) for found in factors for factor in found]
