"""Costs term by term, a data sheet's next to measured ones, and published trainings on the same device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflop import units
from dflop.cost.devices import Device
from dflop.cost.published import RANGES, RUNS
from dflop.cost.terms import LENGTH, NUM_SEQUENCES, SECONDS, Term
from dflop.report.tables import Table, make_table


def terms_table(terms: Sequence[Term]) -> Table:
    """A row per term; `used` says which of the two numbers plans are made from."""

    def text(value: float, term: Term) -> str:
        of_unit = units.seconds if term.unit == SECONDS else units.num_bytes
        return "-" if math.isnan(value) else of_unit(value)

    return make_table(
        "Costs term by term",
        terms,
        {
            "term": lambda t: t.name,
            "data sheet": lambda t: text(t.sheet, t),
            "measured": lambda t: text(t.measured, t),
            "used": lambda t: t.used,
        },
        text={"term", "used"},
        note=(
            f"Of a microbatch of {NUM_SEQUENCES} sequences of {LENGTH} tokens, before corrections. Launches: a forward "
            "pass of one token. Messages that were not profiled are those of the data sheet, where there is one."
        ),
    )


def published_table(device: Device) -> Table:
    """Published trainings of language models on a device, and how far its data sheet is off."""
    ranges = ", ".join(f"{kind} {units.percent(frac)} ({num} runs)" for kind, (num, frac) in RANGES.items())
    return make_table(
        f"Published trainings on {device.name}",
        [run for run in RUNS if device.name.startswith(run.device)],
        {
            "model": lambda run: run.model,
            "parameters": lambda run: units.count(run.num_params),
            "GPUs": lambda run: str(run.num_gpus),
            "tp": lambda run: str(run.tp),
            "pp": lambda run: str(run.pp),
            "published by": lambda run: run.laboratory,
            "predicted off by": lambda run: f"{100 * run.error_frac:+.1f} %",
        },
        text={"model", "published by"},
        note=f"Steps by the data sheet over published ones, less one. Nine of ten on any device are within: {ranges}.",
    )
