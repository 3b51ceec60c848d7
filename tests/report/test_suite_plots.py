"""Pictures of the suites: what is given is in them, and nothing else is drawn."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from matplotlib import rcParams
from PIL import Image

from dflop.errors import ConfigError
from dflop.report.suite_plots import OTHER_STYLE, STYLES, Panel, Series, save_bars, save_lines

BARS = (
    Series("rival", (1.1, math.nan)),
    Series("dflop", (1.5, 2.0), low=(1.4, 1.8), high=(1.6, 2.3)),
)
PANEL = Panel(
    "a model, main",
    "nodes",
    (1.0, 2.0, 4.0),
    "times as fast",
    (
        Series("bound", (2.0, 2.1, 2.2)),
        Series("rival", (1.0, math.nan, 1.2)),
        Series("dflop", (1.3, 1.4, 1.5), low=(1.2, 1.3, 1.4), high=(1.4, 1.5, 1.6)),
    ),
)


def test_bars_are_as_high_as_given_and_the_bound_is_a_line_over_its_group(drawn, tmp_path):
    save_bars(("one", "two"), BARS, (1.8, 3.0), tmp_path / "bars.png", "Simulated")
    (axes,) = drawn[0].axes
    heights = [bar.get_height() for bar in axes.patches]
    assert heights[0] == 1.1
    assert math.isnan(heights[1])
    assert heights[2:] == [1.5, 2.0]
    bounds = [line.get_ydata()[0] for line in axes.lines if len(line.get_ydata()) == 2]
    assert {1.8, 3.0} <= set(bounds)
    with Image.open(tmp_path / "bars.png") as image:
        assert image.width > 400


def test_groups_legend_and_title_can_be_read_in_the_svg(drawn, tmp_path, monkeypatch):
    monkeypatch.setitem(rcParams, "svg.fonttype", "none")
    save_bars(("one", "two"), BARS, (1.8, 3.0), tmp_path / "bars.svg", "Simulated, on paper")
    root = ET.parse(tmp_path / "bars.svg").getroot()
    found = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"one", "two", "rival", "dflop", "bound", "Simulated, on paper"} <= found


def test_lines_bands_and_ticks_are_those_of_the_panel(drawn, tmp_path):
    save_lines((PANEL, PANEL), tmp_path / "lines.png", "Simulated")
    left, right = drawn[0].axes
    for axes in (left, right):
        assert [line.get_label() for line in axes.lines] == ["bound", "rival", "dflop"]
        assert list(axes.lines[-1].get_ydata()) == [1.3, 1.4, 1.5]
        assert len(axes.collections) == 1  # the band of the one with an interval
        assert [t for t in axes.get_xticks() if 1 <= t <= 4] == [1, 2, 4]
    assert len({line.get_color() for line in left.lines}) == 3
    save_lines((PANEL, PANEL, PANEL), tmp_path / "three.png", "Simulated")
    assert [axes.axison for axes in drawn[1].axes] == [True, True, True, False], "the fourth place stays empty"


@pytest.mark.parametrize("from_zero", [True, False])
def test_amounts_are_drawn_from_zero_where_that_is_asked_for(drawn, tmp_path, from_zero):
    save_lines((replace(PANEL, y_from_zero=from_zero),), tmp_path / "lines.png", "Simulated")
    assert bool(drawn[0].axes[0].get_ylim()[0] == 0) is from_zero


def test_competitors_are_told_apart_by_colour_and_by_mark():
    colours, marks = zip(*STYLES.values(), OTHER_STYLE, strict=True)
    assert len(set(colours)) == len(set(marks)) == len(STYLES) + 1


@pytest.mark.parametrize(
    "save", [lambda p: save_bars(("a", "b"), BARS, (1, 1), p, ""), lambda p: save_lines([PANEL], p, "")]
)
def test_other_files_are_refused_before_anything_is_drawn(save, drawn, tmp_path):
    with pytest.raises(ConfigError, match="cannot draw"):
        save(tmp_path / "x.bmp")
    assert drawn == []
