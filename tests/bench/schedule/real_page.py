"""Real steps under each policy, for documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.markdown import ratio, span, table

BLIND, OURS = "arrival", "balanced"


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`packing`: all of it with what other policies do; `packing-short`: the ratio alone."""
    cases = content["cases"]
    head = ("step time, data-blind / dflop", "measured", "simulated beforehand")
    short = [(case["name"], *_ratios(case)) for case in cases]
    idle = [(*row, _idle(case)) for row, case in zip(short, cases, strict=True)]
    told = (
        f"± is the standard deviation over {cases[0]['num_batches']} global batches; samples are "
        f"{content['data']['rows']}, scaled down to a tiny model."
    )
    return {
        "packing": f"{table((*head, 'idle by process'), idle)}\n\n{told} {_notes(cases)}",
        "packing-short": f"{table(head, short)}\n\n{told}",
    }


def _ratios(case: Mapping[str, Any]) -> tuple[str, str]:
    found = case["ratios"][f"{BLIND} / {OURS}"]
    return f"{ratio(found['measured'])} ±{found['measured_sd']:.2f}", ratio(found["simulated"])


def _idle(case: Mapping[str, Any]) -> str:
    both = (case["policies"][policy]["measured_idle_frac"] for policy in (BLIND, OURS))
    return " -> ".join("/".join(f"{100 * share:.0f}" for share in shares) + " %" for shares in both)


def _notes(cases: Sequence[Mapping[str, Any]]) -> str:
    parts = [f"{name} {span(found)}x" for name, found in _others(cases).items()]
    return f"Data-blind over other policies: {'; '.join(parts)}."


def _others(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Per policy that is neither, what it takes off the data-blind step."""
    names = {"bottleneck": "balance of all modules alone", "token_lpt": "LPT on tokens"}
    found: dict[str, list[float]] = {}
    for case in cases:
        for policy in case["policies"].keys() - {BLIND, OURS}:
            measured = case["ratios"][f"{BLIND} / {policy}"]["measured"]
            found.setdefault(names.get(policy, policy), []).append(measured)
    return dict(sorted(found.items()))
