"""Lengths of a dataset that is at hand, and what a text of a length costs where nothing else is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflop.balance.numbers import whole_numbers
from dflop.balance.samples import text_costs
from dflop.errors import ConfigError
from dflop.sampler.costs_of_samples import Ints, SampleCosts, sample_costs

PACKED = "seq_lengths"
"""TRL's column of the lengths of a pack's texts."""


def lengths_of(dataset: Any, column: str = "length") -> Ints:
    """`[N]` tokens of every sample: its `length`, or how many `input_ids` it has.

    Reads one column of a Hugging Face dataset, and every sample of any other one.

    Args:
        dataset: With a length; its samples are mappings.
        column: Name of the length in a sample.

    Raises:
        ConfigError: the dataset has no length, or its samples have neither.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"a {type(dataset).__name__} has no length: its samples cannot be balanced before they are read",
            where="lengths",
            hint="give a dataset with __len__ and __getitem__",
        )
    found = _names(dataset)
    name = next((name for name in (column, "input_ids") if name in found), None)
    if name is None:
        first = "" if found or not len(dataset) else f"they are of type {type(dataset[0]).__name__}"
        has = first or f"they have {', '.join(map(str, found))}"
        raise ConfigError(
            f"samples have no `{column}` and no `input_ids` to take their length from; {has}",
            where="lengths",
            hint="give lengths=[...], or costs=: dflop.sampler.media_costs counts the tokens of texts and media",
        )
    return whole_numbers(name, [int(v) if name == column else len(v) for v in _values(dataset, name)], "lengths")


def costs_of_lengths(lengths: Sequence[int], costs: Sequence[float] | None = None) -> SampleCosts:
    """Costs of samples of these lengths; where none are given, those of texts.

    Args:
        lengths: `[N]` tokens.
        costs: `[N]` in any unit; None: those of `dflop.balance.samples.text_costs`.

    Raises:
        ConfigError: they are not as many, or no such numbers.
    """
    found = sample_costs(lengths, costs)
    if costs is not None:
        return found
    return replace(found, seconds=text_costs(found.tokens))


def costs_of_dataset(dataset: Any, column: str = "length") -> SampleCosts:
    """Costs of texts as long as `lengths_of` says; of packs, whose texts attend to themselves, by their `seq_lengths`.

    Raises:
        ConfigError: as `lengths_of`.
    """
    if PACKED not in _names(dataset):
        return costs_of_lengths(lengths_of(dataset, column).tolist())
    packs = [np.asarray(pack) for pack in _values(dataset, PACKED)]
    costs = [float(text_costs(pack).sum()) for pack in packs]
    return costs_of_lengths([int(pack.sum()) for pack in packs], costs)


def _names(dataset: Any) -> list[Any]:
    """Columns of a dataset, or keys of its first sample."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):
        return columns
    first = dataset[0] if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset) else None
    return list(first) if isinstance(first, Mapping) else []


def _values(dataset: Any, name: str) -> Iterable[Any]:
    is_table = isinstance(getattr(dataset, "column_names", None), list)
    return dataset[name] if is_table else (dataset[i][name] for i in range(len(dataset)))
