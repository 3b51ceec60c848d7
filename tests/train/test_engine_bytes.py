"""Ranks of the real engine hold what the planner charges them with, part by part."""

from __future__ import annotations

import pytest

from tests.train.engine_bytes import PARTS, layouts, rows

TOLERANCE = 0.03
UNCHARGED = 0.02
"""Of a peak: cosines and sines, rows of encoders on their way."""
NUM_TURNS = 6
"""Ranks are started once for a sixth of the layouts."""
COPIED = 0.2
"""Of a peak where weights are gathered, the least of three steps: gloo copies what it sums."""


def tolerance(layout: str, part: str) -> float:
    return COPIED if part == "peak" and "FSDP2" in layout else TOLERANCE


@pytest.mark.lane("layouts")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_stages_hold_what_they_are_charged_with(turn):
    chosen = list(layouts())[turn::NUM_TURNS]
    found = list(rows(chosen))
    assert len({name for name, *_ in found}) == len(chosen) >= 2
    wrong = [
        f"{name}, {place}: {part} {charged[part]:.0f}, measured {measured[part]:.0f}"
        for name, place, charged, measured in found
        for part in PARTS
        if charged[part] != pytest.approx(measured[part], rel=tolerance(name, part), abs=UNCHARGED * measured["peak"])
    ]
    assert not wrong, "\n".join(wrong)
