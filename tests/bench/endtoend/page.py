"""The tables of this bench in the documents, from the JSON it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.bench.endtoend.arms import BLIND, TUNED
from tests.bench.endtoend.paired import Ratio
from tests.bench.endtoend.summary import Side, Summary, summaries
from tests.bench.markdown import table

AGAINST = {TUNED: "one layout, tuned", BLIND: "planned for mean samples"}


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`endtoend`: how much faster; `endtoend-arms`: what the arms were like."""
    found = list(summaries(content["seeds"]))
    num_cores = content["machine"]["num_cores"]
    return {
        "endtoend": table(
            (
                "data", "processes", "data-blind plan", "step, data-blind / dflop", "simulated before",
                "processor time", "seeds", "profile and plan", "saved again after",
            ),
            [_ratio_row(s, num_cores) for s in found],
        ),
        "endtoend-arms": table(
            ("data", "processes", "trained", "layout", "step", "tokens/s", "idle", "memory"),
            [row for s in found for row in _side_rows(s, num_cores)],
        ),
    }  # fmt: skip


def ratio_text(r: Ratio) -> str:
    """A ratio with its interval, or without one where a single seed has none."""
    if r.low is None or r.high is None:
        return f"{r.mean:.2f}x (single seed)"
    return f"{r.mean:.2f}x ({r.low:.2f} to {r.high:.2f})"


def _ratio_row(s: Summary, num_cores: int) -> tuple[str, ...]:
    after = "never" if s.break_even is None else f"{s.break_even} steps"
    return (
        s.data, _processes(s, num_cores), AGAINST[s.against], ratio_text(s.measured), f"{s.simulated:.2f}x",
        ratio_text(s.cpu), str(s.measured.num_seeds), f"{s.setup_s:.0f} s", after,
    )  # fmt: skip


def _side_rows(s: Summary, num_cores: int) -> list[tuple[str, ...]]:
    sides: list[tuple[str, Side]] = [(AGAINST[s.against], s.blind)]
    if s.against == TUNED:  # dflop is the same beside every other, and said once
        sides.append(("dflop", s.ours))
    return [
        (
            s.data, _processes(s, num_cores), name, "; ".join(side.layouts), f"{side.step_s:.2f} s",
            f"{side.tokens_per_s:.0f}", f"{side.idle_frac:.0%}", f"{side.peak_bytes / 2**30:.2f} GiB",
        )
        for name, side in sides
    ]  # fmt: skip


def _processes(s: Summary, num_cores: int) -> str:
    return f"{s.num_processes} on {num_cores} cores" if s.num_processes > num_cores else str(s.num_processes)
