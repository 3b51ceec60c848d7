"""The timeline: every span is a bar in its place, and what is told of it is what the records say."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from dflop.records import LLM
from dflop.report import gantt
from dflop.report.comparison import BatchPair
from dflop.report.gantt import draw_gantt
from dflop.report.observed_steps import MeasuredStep
from dflop.report.plots import MAX_LANES
from dflop.report.run_details import RunDetails
from dflop.report.summary import RunSummary
from dflop.report.timeline import Timeline, batch_timeline
from tests.builders import make_plan
from tests.report.runs import make_span, observe

Drawn = tuple[ET.Element, ET.Element, dict[str, Any]]
"""Names, drawing, data."""


@pytest.fixture(scope="module")
def found(run: tuple[RunSummary, RunDetails]) -> Timeline:
    summary, details = run
    assert summary.comparison is not None
    pair = summary.comparison.typical_pair()
    assert pair is not None
    return batch_timeline(pair, summary.plan, details.compare_plans, details.shapes, summary.num_cores)


@pytest.fixture(scope="module")
def drawn(found: Timeline) -> Drawn:
    made = draw_gantt(found)
    return ET.fromstring(made.names), ET.fromstring(made.drawing), json.loads(made.data)


def test_both_policies_are_there_with_all_ranks(found: Timeline) -> None:
    assert [track.policy for track in found.tracks] == ["data-blind", "balanced"]
    for track in found.tracks:
        assert [lane.name for lane in track.lanes] == [
            "0: vision pp0 dp0", "1: vision pp0 dp1", "2: audio pp0 dp0", "3: llm pp0 dp0", "4: llm pp1 dp0",
        ]  # fmt: skip
        assert not math.isnan(track.predicted_s)
    assert found.end_s >= max(track.step_s for track in found.tracks)


def test_every_sample_is_in_one_microbatch_of_the_llm(found: Timeline) -> None:
    for track in found.tracks:
        for stage in (3, 4):
            bars = [bar for bar in track.lanes[stage].bars if bar.kind == "forward"]
            assert sorted(position for bar in bars for position, _ in bar.items) == list(range(16))
            assert {item for bar in bars for _, item in bar.items} == {-1}


def test_encoders_are_told_by_their_media_items(found: Timeline) -> None:
    for track in found.tracks:
        shown = [item for lane in track.lanes[:2] for bar in lane.bars if bar.kind == "forward" for item in bar.items]
        wanted = [
            (position, number)
            for position, shape in enumerate(found.samples)
            if shape is not None
            for number, item in enumerate(shape.items)
            if item.module == "vision"
        ]
        assert sorted(shown) == wanted


def test_bars_lie_where_their_spans_ran(found: Timeline, drawn: Drawn) -> None:
    _, drawing, data = drawn
    bars = {int(r.get("data-bar", "")): r for r in drawing.iter("rect") if "p" not in (r.get("class") or "").split()}
    told = [bar for track in found.tracks for lane in track.lanes for bar in lane.bars]
    assert sorted(bars) == list(range(len(told))) == list(range(len(data["bars"])))
    for number, bar in enumerate(told):
        x, width = (float((bars[number].get(name) or "").rstrip("%")) / 100 for name in ("x", "width"))
        assert x * found.end_s == pytest.approx(bar.start_s, abs=1e-4 * found.end_s)
        assert width * found.end_s == pytest.approx(bar.duration_s, abs=1e-4 * found.end_s)
        lane, kind, microbatch, start_s, duration_s, predicted_s, compute_s, num_tokens, num_items, items = data[
            "bars"
        ][number]
        assert (data["kinds"][kind], microbatch, num_tokens) == (bar.kind, bar.microbatch, bar.num_tokens)
        assert (start_s, duration_s) == pytest.approx((bar.start_s, bar.duration_s), abs=1e-6)
        assert list(zip(items[::2], items[1::2], strict=True)) == list(bar.items)[: gantt.MAX_ITEMS]
        assert num_items == len(bar.items)
        if bar.kind == "update":
            assert predicted_s is compute_s is None
        else:
            assert (predicted_s, compute_s) == pytest.approx((bar.predicted_s, bar.compute_s), abs=1e-6)
        policy, name = data["lanes"][lane]
        assert name in {one.name for track in found.tracks if track.policy == policy for one in track.lanes}


def pair_of(num_ranks: int, plan_module: str = LLM) -> BatchPair:
    ranks = tuple(observe(0, r, module=plan_module, spans=[make_span(0, 0.1, 0.2)]) for r in range(num_ranks))
    return BatchPair((0,), (MeasuredStep(0, "arrival", ranks),), (MeasuredStep(1, "balanced", ranks[:3]),))


def test_of_many_ranks_some_are_shown_and_that_is_said() -> None:
    made = draw_gantt(batch_timeline(pair_of(MAX_LANES + 9, "$x<&"), make_plan({LLM: 1})))
    assert f"the first {MAX_LANES} of {MAX_LANES + 9} processes" in made.note
    names = [t.text for t in ET.fromstring(made.names)]
    assert f"{MAX_LANES - 1}: $x<& pp0 dp0" in names
    assert f"{MAX_LANES}: $x<& pp0 dp0" not in names


def test_without_predictions_and_shapes_the_timeline_is_there_and_says_so() -> None:
    found = batch_timeline(pair_of(2), make_plan({LLM: 1}))
    assert found.samples == (None,)
    made = draw_gantt(found)
    assert "no predictions are known" in made.note
    assert json.loads(made.data)["samples"] == [None]
