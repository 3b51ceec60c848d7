"""What a job reads before it decides anything, and the record of it: the thread from a run back to a snapshot."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dflop.config import Config
from dflop.errors import StoreError
from dflop.records import CostTable, Plan, RunInput
from dflop.store.reader import Reader
from dflop.store.snapshot import Current


def run_input(
    run_id: str, job: str, attempt: int, snapshot: Current, data_profile_key: str, tables: Sequence[CostTable]
) -> RunInput:
    """What a job has read, to be spooled by it."""
    return RunInput(
        run_id=run_id,
        job=job,
        attempt=attempt,
        snapshot_seq=snapshot.seq,
        snapshot_revision=snapshot.revision,
        data_profile_key=data_profile_key,
        model_profile_key=tables[0].profile_key if tables else "",
        table_ids=tuple(t.table_id for t in tables),
        observed_at_s=time.time(),
    )


def read_costs(config: Config, plan: Plan) -> tuple[list[CostTable], dict[str, float], Current]:
    """(cost tables of a plan, corrections in force by module, the snapshot they were read from).

    Raises:
        StoreError: the snapshot lacks one of the tables.
    """
    with Reader(config.store) as reader:
        found = {t.table_id: t for t in reader.records(CostTable, where={"table_id": plan.table_ids})}
        missing = [i for i in plan.table_ids if i not in found]
        if missing:
            raise StoreError(
                f"cost tables {', '.join(missing)} of the plan are not in the snapshot",
                where=f"{config.store}, snapshot {reader.seq}",
                hint="run `dflop store ingest`",
            )
        tables = list(found.values())
        factors = {c.module: c.factor for c in reader.latest_corrections(plan.table_ids)}
        return tables, factors, reader.snapshot
