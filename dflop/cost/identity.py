"""What makes a cost table that table: a hash of its content, and what a number of its dtype weighs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dflop.errors import CostError, did_you_mean
from dflop.records import FP8_OFF, TRAINS_ALL, TRAINS_NONE, TRAINS_PROJECTOR, CostTable, from_dict, parse_json, to_dict

BYTES_PER_VALUE = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


def bytes_per_value(dtype: str) -> int:
    """Bytes of one number of `dtype`.

    Raises:
        CostError: a dtype this version does not know.
    """
    if dtype not in BYTES_PER_VALUE:
        raise CostError(f"unknown dtype `{dtype}`", hint=did_you_mean(dtype, BYTES_PER_VALUE))
    return BYTES_PER_VALUE[dtype]


def tables_of_json(content: bytes) -> list[CostTable]:
    """Cost tables as this version or an earlier one wrote them into a run directory.

    Raises:
        ValueError, TypeError: they are none.
    """
    rows = parse_json(content)
    try:
        stated = [row if "trains" in row else {**row, "trains": trains_of(row)} for row in rows]
    except (AttributeError, KeyError) as error:
        raise ValueError(f"a table without {error}") from error
    return [from_dict(CostTable, row) for row in stated]


def trains_of(row: Mapping[str, Any]) -> str:
    """What trains of a table that does not state it: no layer without a backward pass does."""
    if row.get("is_frozen"):
        return TRAINS_NONE
    back = row["backward_s"]
    is_passed = any(back[name] for name in ("layer_fixed", "layer_per_token", "layer_per_sq_token", "layer_knots"))
    return TRAINS_ALL if is_passed else TRAINS_PROJECTOR


def with_table_id(table: CostTable) -> CostTable:
    """The table under the hash of its content, whenever it was fitted."""
    content = to_dict(dataclasses.replace(table, table_id="")) | {"is_frozen": table.is_frozen}
    del content["fitted_at_s"], content["trains"]  # ids stay those of earlier versions
    if table.fp8 == FP8_OFF:
        del content["fp8"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return dataclasses.replace(table, table_id=digest[:16])
