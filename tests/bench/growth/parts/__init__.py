"""Every part whose growth is measured, room by room."""

from __future__ import annotations

from tests.bench.growth.part import Part
from tests.bench.growth.parts import correct, data, ingest, plan, run, schedule, simulate, store, train

PARTS: tuple[Part, ...] = (
    *data.PARTS, *plan.PARTS, *simulate.PARTS, *schedule.PARTS, *correct.PARTS, *store.PARTS, *ingest.PARTS,
    *train.PARTS, *run.PARTS,
)  # fmt: skip
