"""Data profiles as frames of columns: what plots and comparisons need, without an object per sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from dflop.errors import DataError, did_you_mean
from dflop.records import LLM
from dflop.store.console import named_query, open_query, query


def profile_frame(store_root: Path | str, profile_key: str) -> pl.DataFrame:
    """The healthy samples of a data profile, in the columns of `dflop.data.distribution.shapes_frame`.

    Two columns more say what was done to samples over the limit: `media_level`, `num_cut_tokens`.

    Raises:
        StoreError: there is no store, or it cannot be read.
    """
    samples = _frame(store_root, named_query("profile_samples").sql, {"profile_key": profile_key})
    loads = _frame(
        store_root,
        "select sample_index, module, num_items as items, num_tokens as tokens, sum_sq_tokens from v_sample_load"
        " where profile_key = $profile_key",
        {"profile_key": profile_key},
    )
    frame = samples.drop("num_llm_tokens")
    for module in [*sorted(set(loads["module"].unique()) - {LLM}), LLM]:
        values = ("items", "tokens", "sum_sq_tokens")
        of_module = loads.filter(pl.col("module") == module).select(
            "sample_index", *(pl.col(value).alias(f"{module}_{value}") for value in values)
        )
        frame = frame.join(of_module, on="sample_index", how="left", maintain_order="left").with_columns(
            pl.col(f"{module}_{value}").fill_null(0) for value in values
        )
    return frame


def find_profile(store_root: Path | str, key: str, kind: str = "data") -> Mapping[str, Any]:
    """A profile (`data` or `model`) by the first digits of its key; the newest one for an empty key.

    Returns:
        Its row of the named query `data_profiles` or `model_profiles`.

    Raises:
        StoreError: there is no store, or it cannot be read.
        DataError: none or several profiles begin so.
    """
    columns, rows = query(store_root, named_query(f"{kind}_profiles").sql)
    profiles = [dict(zip(columns, row, strict=True)) for row in rows]
    found = [p for p in profiles if str(p["profile_key"]).startswith(key)]
    if not found:
        known = [str(p["profile_key"]) for p in profiles]
        make_one = f"make one: dflop {'data profile' if kind == 'data' else 'profile'} CONFIG"
        hint = did_you_mean(key, known) if known else make_one
        raise DataError(f"no {kind} profile `{key}`", where=str(store_root), hint=hint)
    if key and len(found) > 1:
        listed = ", ".join(p["profile_key"] for p in found)
        raise DataError(f"`{key}` begins several {kind} profiles: {listed}", where=str(store_root))
    return found[0]


def _frame(store_root: Path | str, sql: str, params: Mapping[str, Any]) -> pl.DataFrame:
    with open_query(store_root, sql, params) as result:
        frame = pl.from_arrow(pa.Table.from_batches(list(result.batches), schema=result.schema))
    assert isinstance(frame, pl.DataFrame)
    return frame
