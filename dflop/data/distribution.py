"""The joint distribution of a dataset's shapes: its summary for people, batches of it for the planner.

Planning on means is what data-blind systems do; here every number stays attached to its sample, so the correlations
that make batches uneven (long videos with short texts, many images with long answers) survive into the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from dflop.errors import DataError
from dflop.records import LLM, SampleShape

_ROUNDING = 1e-12
"""Slack of cumulative shares: ten tenths summed up are a little less than 1."""

GROUPS = ("text", "single_image", "multi_image", "video", "audio", "mixed")
"""Of samples by their media, as `sql/queries/profile_samples.sql` sorts them."""


def summary(frame: pl.DataFrame) -> pl.DataFrame:
    """Quantiles of tokens per modality group and module, of a `profile_frame`, by the samples' weights.

    Returns:
        Columns `group`, `module`, `num_samples`, `p50_tokens`, `p90_tokens`, `p99_tokens`, `max_tokens`; one row per
        group (`all` last) and module that has work in it.
    """
    tokens_by_module = tokens_of(frame)
    groups, weights = frame["group"].to_numpy(), frame["weight"].to_numpy()
    rows = []
    for group in (*GROUPS, "all"):
        chosen = (groups == group) | (group == "all")
        for module in [LLM, *(m for m in tokens_by_module if m != LLM)]:
            # Of the samples that have work for the module: zeros of all others would hide how uneven these are.
            worked = chosen & (tokens_by_module[module] > 0)
            if worked.any():
                tokens = tokens_by_module[module][worked]
                values = quantiles(tokens, weights[worked], (0.5, 0.9, 0.99))
                rows.append((group, module, len(tokens), *values, int(tokens.max())))
    numbers = ("num_samples", "p50_tokens", "p90_tokens", "p99_tokens", "max_tokens")
    schema = {"group": pl.String, "module": pl.String, **dict.fromkeys(numbers, pl.Int64)}
    return pl.DataFrame(rows, schema, orient="row")


def summary_text(frame: pl.DataFrame) -> str:
    """`summary` as a table of plain characters, with every row."""
    with pl.Config(
        tbl_rows=-1, tbl_cols=-1, tbl_width_chars=120, tbl_formatting="ASCII_MARKDOWN",
        tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True,
    ):  # fmt: skip
        return str(summary(frame))


def quantiles(values: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], shares: Sequence[float]) -> list[int]:
    """Per share, the smallest value that this share of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    at = np.searchsorted(reached, np.array(shares) - _ROUNDING)
    return [int(v) for v in values[order][np.minimum(at, len(values) - 1)]]


def tokens_of(frame: pl.DataFrame) -> dict[str, npt.NDArray[np.int64]]:
    """Per module, tokens of every sample of a `profile_frame`; encoders sorted, the LLM last."""
    suffix = "_items"
    modules = sorted(n.removesuffix(suffix) for n in frame.columns if n.endswith(suffix))
    modules.sort(key=lambda module: module == LLM)
    return {module: frame[f"{module}_tokens"].to_numpy() for module in modules}


def sample_batches(
    shapes: Sequence[SampleShape], global_batch_size: int, num_batches: int, seed: int
) -> list[tuple[SampleShape, ...]]:
    """Independent global batches for the planner to simulate, each drawn by weight and without replacement.

    A dataset smaller than a batch gives batches of the whole dataset.

    Raises:
        DataError: there are no shapes.
    """
    if not shapes:
        raise DataError("no valid samples to draw batches from", hint="see the quarantine table for the reasons")
    rng = np.random.default_rng(seed)
    size = min(global_batch_size, len(shapes))
    weights = np.array([s.weight for s in shapes])
    shares = None if (weights == weights[0]).all() else weights / weights.sum()
    draws = (rng.choice(len(shapes), size=size, replace=False, p=shares) for _ in range(num_batches))
    return [tuple(shapes[i] for i in draw) for draw in draws]
