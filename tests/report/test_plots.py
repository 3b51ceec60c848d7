from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from dflop.records import LLM
from dflop.report import plots
from dflop.report.compare import BatchPair
from dflop.report.steps import MeasuredStep
from dflop.report.summary import RunSummary
from tests.builders import make_inline_plan, make_plan
from tests.report.runs import make_span, observe, realistic

NAMES = ("loss", "bars", "timeline")


def render(summary: RunSummary, name: str) -> str:
    comparison = summary.comparison
    assert comparison is not None
    pair = comparison.typical_pair()
    assert pair is not None
    return {
        "loss": lambda: plots.loss_curve(summary.steps),
        "bars": lambda: plots.step_time_bars(comparison),
        "timeline": lambda: plots.timeline(pair, summary.plan),
    }[name]()


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_valid_deterministic_and_has_no_date(name: str) -> None:
    svg = render(realistic(), name)
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.get("aria-label")
    assert root.get("viewBox")
    assert root.get("width") is None
    assert svg == render(realistic(), name)
    assert "metadata" not in svg
    assert plots.INK not in svg


def test_ids_of_several_plots_do_not_collide_and_every_reference_resolves() -> None:
    summary = realistic()
    ids: list[str] = []
    for name in NAMES:
        root = ET.fromstring(render(summary, name))
        own = {node.get("id") for node in root.iter() if node.get("id")}
        ids += [str(i) for i in own]
        for node in root.iter():
            for value in (node.get("{http://www.w3.org/1999/xlink}href"), node.get("clip-path")):
                target = (value or "").removeprefix("url(").removesuffix(")").removeprefix("#")
                assert not target or target in own
    assert len(ids) == len(set(ids))


def test_axes_carry_units() -> None:
    summary = realistic()
    assert {"loss (nats per token)", "optimizer step"} <= set(texts(render(summary, "loss")))
    assert "time per step (ms), median" in texts(render(summary, "bars"))
    assert "time since the start of the step (ms)" in texts(render(summary, "timeline"))


def test_timeline_shows_both_policies_and_every_rank() -> None:
    shown = texts(render(realistic(), "timeline"))
    assert any(t.startswith("data-blind: ") and t.endswith("measured") for t in shown)
    assert any(t.startswith("balanced: ") for t in shown)
    assert shown.count("3: llm pp0 dp0") == 2


def test_lanes_of_a_chain_are_stages_of_no_module() -> None:
    ranks = tuple(observe(0, r, stage=r, spans=[make_span(0, 0.1, 0.2)]) for r in range(2))
    pair = BatchPair((0,), (MeasuredStep(0, "arrival", ranks),), (MeasuredStep(1, "balanced", ranks),))
    shown = texts(plots.timeline(pair, make_inline_plan(1, pp=2)))
    assert shown.count("0: stage 0 dp0") == shown.count("1: stage 1 dp0") == 2


def test_timeline_of_many_ranks_is_cut_and_says_so() -> None:
    ranks = tuple(observe(0, r, module="$x<&", spans=[make_span(0, 0.1, 0.2)]) for r in range(plots.MAX_LANES + 9))
    pair = BatchPair((0,), (MeasuredStep(0, "arrival", ranks),), (MeasuredStep(1, "balanced", ranks[:3]),))
    shown = texts(plots.timeline(pair, make_plan({LLM: 1})))
    assert f"first {plots.MAX_LANES} of {plots.MAX_LANES + 9} ranks" in shown
    assert f"{plots.MAX_LANES - 1}: $x<& pp0 dp0" in shown
    assert f"{plots.MAX_LANES}: $x<& pp0 dp0" not in shown


def test_a_diverged_loss_still_has_a_plot() -> None:
    steps = [MeasuredStep(t, "balanced", (observe(t, loss=5.0 if t < 3 else math.nan),)) for t in range(6)]
    ET.fromstring(plots.loss_curve(steps))
