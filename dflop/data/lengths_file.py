"""Lengths of samples, or what they cost, from one file: plain numbers, or rows with a column of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.errors import ConfigError

SUFFIXES = (".txt", ".csv", ".json", ".jsonl", ".parquet", ".npy")
LENGTHS = ("length", "lengths", "num_tokens", "num_llm_tokens", "tokens", "input_ids")
COSTS = ("cost", "costs", "seconds")
_PLAIN = "numbers"
Column = npt.NDArray[np.float64]


def read_lengths(path: Path) -> tuple[Column | None, Column | None]:
    """(lengths in tokens, costs), each None where the file has none.

    Numbers without a name are lengths where all are whole, else costs. A list, as `input_ids` are, counts its items.

    Raises:
        ConfigError: the file cannot be read, or has neither.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"unknown suffix `{path.suffix}`", where=str(path), hint=f"valid: {', '.join(SUFFIXES)}")
    try:
        columns = _columns(path)
        lengths, costs = (_numbers(columns, names) for names in (LENGTHS, COSTS))
        plain = _numbers(columns, (_PLAIN,))
    except (OSError, ValueError, TypeError, LookupError) as error:
        words = " ".join(str(error).split())[:200]
        raise ConfigError(f"lengths cannot be read: {words}", where=str(path)) from error
    if plain is not None:
        lengths, costs = (plain, None) if (plain == np.floor(plain)).all() else (None, plain)
    if lengths is None and costs is None:
        raise ConfigError(
            f"no column of lengths or costs among: {', '.join(map(str, columns)) or 'none'}",
            where=str(path),
            hint=f"name it one of {', '.join((*LENGTHS, *COSTS))}",
        )
    for found in (lengths, costs):
        if found is not None and not (len(found) and np.isfinite(found).all() and (found >= 0).all()):
            raise ConfigError("there are no numbers, or some are negative or infinite", where=str(path))
    return lengths, costs


def _columns(path: Path) -> Mapping[str, Iterable[Any]]:
    if path.suffix == ".npy":
        return {_PLAIN: _only_column(np.load(path, allow_pickle=False))}
    if path.suffix == ".parquet":
        return _of_parquet(path)
    text = path.read_text()
    if path.suffix == ".txt":
        return {_PLAIN: text.split()}
    if path.suffix == ".csv":
        head, *rows = list(csv.reader(text.splitlines()))
        if head[0].replace(".", "", 1).isdigit():
            return {_PLAIN: _only_column(np.array([head, *rows]))}
        return dict(zip(head, zip(*rows, strict=True), strict=True))
    rows = (
        json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line.strip()]
    )
    if isinstance(rows, list) and rows and isinstance(rows[0], dict):
        return {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}
    return rows if isinstance(rows, dict) else {_PLAIN: rows}


def _of_parquet(path: Path) -> Mapping[str, Iterable[Any]]:
    import polars as pl  # here, so that other files are read without it

    try:
        names = pl.read_parquet_schema(path)
        wanted = [name for name in (*LENGTHS, *COSTS) if name in names]
        return pl.read_parquet(path, columns=wanted).to_dict(as_series=False) if wanted else dict.fromkeys(names, ())
    except pl.exceptions.PolarsError as error:
        raise ValueError(str(error)) from error


def _only_column(found: npt.NDArray[Any]) -> list[Any]:
    """The only column; of several without names nothing says which one holds lengths."""
    if found.size != max(found.shape, default=1):
        raise ValueError(f"only one column without a name, not an array of shape {found.shape}")
    column: list[Any] = found.ravel().tolist()
    return column


def _numbers(columns: Mapping[str, Iterable[Any]], names: Iterable[str]) -> Column | None:
    name = next((name for name in names if name in columns), None)
    if name is None:
        return None
    return np.array([len(v) if isinstance(v, list) else float(v) for v in columns[name]], dtype=np.float64)
