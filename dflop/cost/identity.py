"""What makes a cost table that table: a hash of its content, and what a parameter or activation of its dtype weighs."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from dflop.cost import curve
from dflop.errors import CostError, did_you_mean
from dflop.records import CostTable, to_dict

BYTES_PER_VALUE = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


def bytes_per_value(dtype: str) -> int:
    """Bytes of one number of `dtype`.

    Raises:
        CostError: a dtype this version does not know.
    """
    if dtype not in BYTES_PER_VALUE:
        raise CostError(f"unknown dtype `{dtype}`", hint=did_you_mean(dtype, BYTES_PER_VALUE))
    return BYTES_PER_VALUE[dtype]


def mean_table(plain: CostTable, again: CostTable, frac: float) -> CostTable:
    """The table of a module of which a share of layers recomputes: edges of `plain`, layers between the two."""
    forward, backward, kept = (
        curve.combine([(1 - frac, a), (frac, b)], [1.0, 0.0])
        for a, b in (
            (plain.forward_s, again.forward_s),
            (plain.backward_s, again.backward_s),
            (plain.activation_bytes, again.activation_bytes),
        )
    )
    return with_table_id(dataclasses.replace(again, forward_s=forward, backward_s=backward, activation_bytes=kept))


def with_table_id(table: CostTable) -> CostTable:
    """The table under the hash of its content, whenever it was fitted."""
    content = to_dict(dataclasses.replace(table, table_id=""))
    del content["fitted_at_s"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return dataclasses.replace(table, table_id=digest[:16])
