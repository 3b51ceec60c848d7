"""Rows that a profile leaves out, in words: by reason, with the limit that left them out, its key and what helps."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dflop.records import QuarantinedSample

_TOO_LONG = re.compile(r"sample too long: (\d+) tokens > max_llm_tokens (\d+)")
_NUMBER = re.compile(r"[0-9a-f]{12,}|\d+")
MAX_REASONS = 5
SHORTEN = "raise dataset.max_llm_tokens, or shorten longer rows with dataset.overlong: [shrink] or [shrink, truncate]"


def skipped_text(bad: Sequence[QuarantinedSample], num_rows: int) -> list[str]:
    """A line per reason, the most frequent first; reasons that differ in numbers only are one.

    Args:
        bad: Rows that were left out.
        num_rows: Of the dataset, those left out included.
    """
    lengths = [(int(found[1]), int(found[2])) for b in bad if (found := _TOO_LONG.match(b.reason))]
    lines = []
    if lengths:
        tokens, limit = sorted(length for length, _ in lengths), lengths[0][1]
        span = f"{tokens[0]:,}" if tokens[0] == tokens[-1] else f"{tokens[0]:,} to {tokens[-1]:,}"
        longer = f"{len(tokens)} of {num_rows} rows are longer ({span} tokens) and skipped"
        lines.append(f"dataset.max_llm_tokens: {limit}; {longer}; {SHORTEN}")
    others: dict[str, list[QuarantinedSample]] = {}
    for b in bad:
        if not _TOO_LONG.match(b.reason):
            others.setdefault(_NUMBER.sub("#", b.reason), []).append(b)
    ordered = sorted(others.values(), key=len, reverse=True)
    for alike in ordered[:MAX_REASONS]:
        first = alike[0]
        lines.append(f"{len(alike)} of {num_rows} rows are skipped, first row {first.sample_index}: {first.reason}")
    if rest := sum(map(len, ordered[MAX_REASONS:])):
        lines.append(f"{rest} rows are skipped for other reasons: dflop sql quarantine")
    return lines


def hint_for(bad: Sequence[QuarantinedSample]) -> str:
    """What to do about most of the rows that were left out."""
    num_long = sum(_TOO_LONG.match(b.reason) is not None for b in bad)
    return SHORTEN if 2 * num_long > len(bad) else "fix the dataset or raise data_profile.max_bad_frac"
