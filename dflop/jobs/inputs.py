"""What a job read before it decided anything, as a record: the thread from a plan or a run back to a snapshot."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dflop.records import CostTable, RunInput
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
