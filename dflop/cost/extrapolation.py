"""Where a cost table stops being evidence: loads that are refused."""

from __future__ import annotations

import numpy as np

from dflop.cost.curve import Load
from dflop.errors import CostError
from dflop.records import CostTable

ROUNDING = 1.0 + 1e-12
"""A mean length is a quotient; the probe that set the limit must not lie beyond it."""


def refuse_far(table: CostTable, load: Load, max_extrapolation: float) -> None:
    """Nothing, unless a load lies beyond `max_extrapolation` times the largest probe, where the table knows that.

    Raises:
        CostError: what was asked, what was probed, and what to do.
    """
    tokens, sum_sq = (np.asarray(part, dtype=np.float64) for part in load[1:])
    max_length = max_extrapolation * table.max_mean_length * ROUNDING
    if table.max_tokens and np.any(tokens > max_extrapolation * table.max_tokens):
        asked, probed = f"{int(tokens.max())} tokens", f"{table.min_tokens} to {table.max_tokens} tokens"
    elif max_length and np.any(sum_sq > max_length * tokens):
        length = float(np.max(np.where(tokens > 0, sum_sq, 0.0) / np.maximum(tokens, 1.0)))
        asked, probed = f"a mean length of {length:.0f} tokens", f"mean lengths up to {table.max_mean_length:.0f}"
    else:
        return
    raise CostError(
        f"cost of module `{table.module}` asked for {asked}; probed: {probed}, and at most {max_extrapolation:g} "
        "times that is predicted",
        where=f"cost table {table.table_id} at tp {table.tp} on {table.hardware}",
        hint="profile the module on larger groups of samples, or use CostModel(..., extrapolate=True)",
    )
