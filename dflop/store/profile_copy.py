"""Rows of a data profile under another key: of a dataset that has grown, the rows that were there before.

They are written again, not referred to: the rows of a profile lie together whatever becomes of another one, and no
reader need know.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflop.records import ProfileRecord, QuarantinedSample, SampleShape
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter


def copy_profile(
    store_root: Path, base: ProfileRecord, key: str, run_id: str, weights: npt.NDArray[np.float64] | None = None
) -> bool:
    """Spools shapes and quarantine rows of a profile under another key; False where the store has not all of them.

    Args:
        store_root: The store.
        base: Profile to be copied.
        key: That the copies get.
        run_id: Of the run that spools them.
        weights: New ones by `sample_index`; None: as they are.
    """
    where = {"profile_key": base.profile_key}
    with Reader(store_root) as reader:
        shapes = reader.table(SampleShape, "v_sample_shape", where=where, order="sample_index")
        found = reader.records(QuarantinedSample, where={**where, "phase": "profile"})
    bad = {row.sample_index: row for row in found}  # a job that was killed and repeated has written some twice
    if (len(shapes), len(bad)) != (base.num_rows, base.num_quarantined):
        return False
    changes = {"profile_key": pa.array(np.full(len(shapes), key))}
    if weights is not None:
        changes["weight"] = pa.array(weights[shapes["sample_index"].to_numpy()])
    for name, column in changes.items():
        shapes = shapes.set_column(shapes.column_names.index(name), name, column)
    with SpoolWriter(store_root, run_id, "data-known") as spool:
        spool.append_table(SampleShape, shapes)
        for row in bad.values():
            spool.append(replace(row, profile_key=key, run_id=run_id))
    return True
