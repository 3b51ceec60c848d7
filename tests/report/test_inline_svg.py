"""Drawings without styles look the same: what a style said, an attribute says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from matplotlib.figure import Figure

from dflop.report.inline_svg import without_styles
from dflop.report.plots import STYLE, svg_text
from tests.report.runs import HOSTILE

ROOT = "<svg>{}</svg>"


def test_what_no_attribute_can_say_is_refused() -> None:
    with pytest.raises(ValueError, match="mix-blend-mode: multiply"):
        without_styles(ROOT.format('<g style="mix-blend-mode: multiply"/>'))


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1, 4, 9], marker="o", linestyle="--", label=HOSTILE)
    axes.barh(1, 2, hatch="///", facecolor="none", edgecolor="#0072B2", alpha=0.4)
    axes.text(1, 1, 'style="fill: none" <b>', rotation=30, alpha=0.5)
    axes.set_xscale("log")
    axes.grid()
    figure.legend()


def test_everything_that_matplotlib_writes_is_understood() -> None:
    svg = svg_text("any", "any", (4.0, 3.0), draw)
    root = ET.fromstring(svg)
    assert not re.search(r"<[^<>]*\sstyle=", svg)
    assert "<style" not in svg
    assert {'style="fill: none" <b>', HOSTILE} <= {node.text for node in root.iter() if node.text}


def test_no_property_is_lost() -> None:
    import io

    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "any"}):
        figure = Figure(figsize=(4.0, 3.0), layout="constrained")
        draw(figure)
        figure.savefig(out, format="svg", transparent=True)
    given = out.getvalue()
    kept = without_styles(given[given.index("<svg") :])
    for name in ("fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity"):
        told = re.findall(rf"[\" ;]{name}: ([^;\"]+)", re.sub(r"<style.*?</style>", "", given, flags=re.DOTALL))
        assert sorted(re.findall(rf' {name}="([^"]+)"', kept)) == sorted(told), name
