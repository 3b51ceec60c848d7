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
    """Healthy samples of a data profile.

    Returns:
        Columns of the named query `profile_samples`, and `<module>_{items,tokens,sum_sq_tokens}` per module, the LLM
        last; 0 where a sample has no work for it.
    """
    params, values = {"profile_key": profile_key}, ("items", "tokens", "sum_sq_tokens")
    frame = _frame(store_root, named_query("profile_samples").sql, params).drop("num_llm_tokens")
    columns = "sample_index, module, num_items as items, num_tokens as tokens, sum_sq_tokens"
    sql = f"select {columns} from v_sample_load where profile_key = $profile_key"
    loads = _frame(store_root, sql, params)
    for module in [*sorted({*loads["module"]} - {LLM}), LLM]:
        of_module = loads.filter(pl.col("module") == module)
        named = of_module.select("sample_index", *(pl.col(value).alias(f"{module}_{value}") for value in values))
        frame = frame.join(named, on="sample_index", how="left", maintain_order="left")
    return frame.with_columns(pl.col(rf"^.*_({'|'.join(values)})$").fill_null(0))


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
        make_one = f"create one: dflop {'data profile' if kind == 'data' else 'profile'} CONFIG"
        hint = did_you_mean(key, [str(p["profile_key"]) for p in profiles]) if profiles else make_one
        raise DataError(f"no {kind} profile `{key}`", where=str(store_root), hint=hint)
    if key and len(found) > 1:
        listed = ", ".join(p["profile_key"] for p in found)
        raise DataError(f"`{key}` begins several {kind} profiles: {listed}", where=str(store_root))
    return found[0]


def profile_of_costs(store_root: Path | str, name: str) -> Mapping[str, Any]:
    """The model profile of a key, as `find_profile` does, or of a run: the profile of its newest plan's cost tables."""
    sql = (
        "select profile_key from v_run_plan inner join v_plan using (run_id, plan_id) inner join cost_table "
        "on list_contains(v_plan.table_ids, cost_table.table_id) where run_id = $run_id order by number desc limit 1"
    )
    found = query(store_root, sql, {"run_id": name})[1]
    return find_profile(store_root, found[0][0] if found else name, "model")


def _frame(store_root: Path | str, sql: str, params: Mapping[str, Any]) -> pl.DataFrame:
    with open_query(store_root, sql, params) as result:
        frame = pl.from_arrow(pa.Table.from_batches(list(result.batches), schema=result.schema))
    assert isinstance(frame, pl.DataFrame)
    return frame
