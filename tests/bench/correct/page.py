"""Corrections under known truths, for documents; all of it is simulated."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.markdown import span, table

CASES = {
    "right": "predictions are right",
    "one LLM bucket 2x": "one size of the LLM 2x",
    "encoder top buckets 2x": "the encoder's largest sizes 2x",
    "LLM 1.5x": "all of the LLM 1.5x",
    "drift to 1.8x": "one size drifts to 1.8x",
    "sudden 1.6x": "1.6x from step 60 on",
    "all buckets lognormal .25": "every size off, lognormal 0.25",
    "slow rank 1.5x": "one rank of four 1.5x",
    "bucket 2x and slow rank 1.5x": "one size 2x and one rank 1.5x",
}
CONTENDERS = {
    "none": "nothing corrected",
    "module average": "average per module",
    "bucket average": "average per size",
    "ours": "**dflop**",
}
STATIC = ("one LLM bucket 2x", "encoder top buckets 2x", "slow rank 1.5x", "bucket 2x and slow rank 1.5x")
"""Where a misprediction costs much from the first step on."""
Runs = Sequence[Mapping[str, Any]]


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`correct`: regret of every way of correcting; `correct-short`: how much of it is recovered."""
    found = content["synthetic"]
    little, much = (f(run["noise_frac"] for run in found["runs"]) for f in (min, max))
    head = ("truth", *CONTENDERS.values(), f"dflop, {100 * much:.0f} % noise")
    rows = [
        (told, *(_regret(found["runs"], case, name, little) for name in CONTENDERS),
         _regret(found["runs"], case, "ours", much))
        for case, told in CASES.items()
    ]  # fmt: skip
    shares = [_recovered(found["runs"], case, little) for case in STATIC]
    seeds = f"{len(found['seeds'])} seeds"
    return {
        "correct": table(head, rows),
        "correct-short": f"**Simulated**, {100 * little:.0f} % noise, {seeds}: of what a misprediction of sizes or "
        f"ranks costs, {span([100 * share for share in shares], '.0f')} % is recovered in steps 5 to 20; where "
        f"predictions are right, {_regret(found['runs'], 'right', 'ours', little)} % of a step is lost (in "
        f"steps 5 to 20 / in the last 40 of {found['num_steps']}).",
    }  # fmt: skip


def _mean(runs: Runs, case: str, contender: str, noise_frac: float, what: str) -> float:
    return statistics.fmean(
        run[what]
        for run in runs
        if (run["case"], run["contender"], run["noise_frac"]) == (case, contender, noise_frac)
    )  # fmt: skip


def _regret(runs: Runs, case: str, contender: str, noise_frac: float) -> str:
    both = (100 * _mean(runs, case, contender, noise_frac, what) for what in ("early_regret", "last_regret"))
    return " / ".join("0" if value < 0.005 else f"{value:.2f}" if value < 1 else f"{value:.1f}" for value in both)


def _recovered(runs: Runs, case: str, noise_frac: float) -> float:
    ours, none = (_mean(runs, case, name, noise_frac, "early_regret") for name in ("ours", "none"))
    return 1 - ours / none
