"""Pictures of the suites: what is given is in them, and nothing else is drawn."""

import math

from PIL import Image

from dflop.report.suite_plots import Panel, Series, bars, lines

BARS = (Series("rival", (1.1, math.nan)), Series("dflop", (1.5, 2.0), low=(1.4, 1.8), high=(1.6, 2.3)))
OURS = Series("dflop", (1.3, 1.4, 1.5), low=(1.2, 1.3, 1.4), high=(1.4, 1.5, 1.6))
SERIES = (Series("bound", (2.0, 2.1, 2.2)), Series("rival", (1.0, math.nan, 1.2)), OURS)
PANEL = Panel("a model, main", "nodes", (1.0, 2.0, 4.0), "times as fast", SERIES)


def test_bars_are_as_high_as_given_and_the_bound_is_a_line_over_its_group(drawn, tmp_path):
    bars("bars", "bars", ("one", "two"), BARS, (1.8, 3.0)).save(tmp_path / "bars.png", "Simulated")
    (axes,) = drawn[0].axes
    heights = [bar.get_height() for bar in axes.patches]
    assert heights[0] == 1.1
    assert math.isnan(heights[1])
    assert heights[2:] == [1.5, 2.0]
    bounds = [line.get_ydata()[0] for line in axes.lines if len(line.get_ydata()) == 2]
    assert {1.8, 3.0} <= set(bounds)
    with Image.open(tmp_path / "bars.png") as image:
        assert image.width > 400


def test_lines_and_bands_are_those_of_the_panel(drawn, tmp_path):
    lines("lines", "lines", (PANEL, PANEL)).save(tmp_path / "lines.png", "Simulated")
    for axes in drawn[0].axes:
        assert [line.get_label() for line in axes.lines] == ["bound", "rival", "dflop"]
        assert list(axes.lines[-1].get_ydata()) == [1.3, 1.4, 1.5]
        assert len(axes.collections) == 1  # the band of the one with an interval
