"""What a job reads before it decides anything, and the record of it: the thread from a run back to a snapshot."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from dflop.config import Config
from dflop.correct.estimate import Prior
from dflop.cost.model import CostModel
from dflop.errors import StoreError
from dflop.records import Correction, CostTable, ModuleFactors, Plan, RunInput
from dflop.store.reader import Reader
from dflop.store.snapshot import Current

DAY_S = 86400.0
LEAST_PRIOR_SD = 0.05
"""Least uncertainty of a factor from another job: no two jobs are quite alike."""


def run_input(
    run_id: str, job: str, attempt: int, snapshot: Current, data_profile_key: str, tables: Sequence[CostTable]
) -> RunInput:
    """What a job has read, to be spooled by it."""
    model_profile_key, ids = tables[0].profile_key if tables else "", tuple(table.table_id for table in tables)
    return RunInput(
        run_id, job, attempt, snapshot.seq, snapshot.revision, data_profile_key, model_profile_key, ids, time.time()
    )


def read_costs(config: Config, plan: Plan) -> tuple[list[CostTable], dict[str, Prior], Current]:
    """(cost tables of a plan, what earlier runs learnt of them, the snapshot both were read from).

    Raises:
        StoreError: the snapshot lacks one of the tables.
    """
    with Reader(config.store) as reader:
        tables = list({t.table_id: t for t in reader.records(CostTable, where={"table_id": plan.table_ids})}.values())
        if missing := [i for i in plan.table_ids if i not in {t.table_id for t in tables}]:
            what = f"cost tables {', '.join(missing)} of the plan are not in the snapshot"
            raise StoreError(what, where=f"{config.store}, snapshot {reader.seq}", hint="run `dflop store ingest`")
        frozen = {t.module for t in tables if t.is_frozen}
        sets = _correction_sets(reader, tables[0].profile_key, frozen)
        return (
            tables,
            earlier_runs(sets, config.correct.half_life_days, reader.snapshot.published_at_s),
            reader.snapshot,
        )


def factors_in_force(
    reader: Reader, cost: CostModel, profile_key: str, half_life_days: float
) -> dict[str, ModuleFactors]:
    """Factors on the predicted seconds of a cost model's tables, per module that was ever corrected.

    Plans, comparisons and the sampler ask here. What was learnt long before the snapshot was published counts for
    little: by its time and no clock, so that all who read one snapshot come to the same costs. Modules with frozen
    weights have separate corrections.
    """
    found, profiled = {}, {table.module for table in cost.tables}
    frozen = {table.module for table in cost.tables if table.is_frozen}
    for module, rows in _correction_sets(reader, profile_key, frozen).items():
        if module not in profiled:
            continue
        kept = _kept(rows, half_life_days, reader.snapshot.published_at_s)
        factors = tuple((row.factor if row.is_in_force else row.level) ** kept for row in rows)
        level = rows[0].level ** kept if len(rows) > 1 else factors[0]
        found[module] = ModuleFactors(module, level, tuple(row.min_tokens for row in rows[1:]), factors)
    return found


def _correction_sets(reader: Reader, profile_key: str, frozen: Collection[str]) -> dict[str, list[Correction]]:
    """Per module, its newest set of corrections in the state it is in: a row per bucket, by size."""
    rows = [
        row
        for is_frozen in (False, True)
        for row in reader.corrections_in_force(profile_key, is_frozen=is_frozen)
        if (row.module in frozen) == is_frozen
    ]
    rows.sort(key=lambda row: (row.module, row.min_tokens))
    return {module: list(found) for module, found in groupby(rows, lambda row: row.module)}


def earlier_runs(sets: Mapping[str, Sequence[Correction]], half_life_days: float, now_s: float) -> dict[str, Prior]:
    """What a module's rows per bucket, by size, are worth by now: factors return to 1, unknown ones to the usual.

    After the half-life the logarithm of a factor counts half.
    """
    priors = {}
    for module, rows in sets.items():
        kept = _kept(rows, half_life_days, now_s)
        unknown = math.sqrt(1 - kept**2) * Prior().sd[0]
        priors[module] = Prior(
            edges=tuple(row.min_tokens for row in rows[1:]),
            factors=tuple(row.factor**kept for row in rows),
            sd=tuple(math.hypot(kept * max(row.sd_frac, LEAST_PRIOR_SD), unknown) for row in rows),
            level=rows[0].level ** kept,
        )
    return priors


def _kept(rows: Sequence[Correction], half_life_days: float, now_s: float) -> float:
    """Part of the logarithm of its factors that is left of a set."""
    return float(2.0 ** (-max(0.0, now_s - rows[0].observed_at_s) / DAY_S / half_life_days))
