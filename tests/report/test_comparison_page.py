from __future__ import annotations

import re

from dflop.report.calculator import make_calculator
from dflop.report.comparison_page import ComparisonPage, Drawing, render_comparison, split_table
from dflop.report.suite_plots import Series, bars_svg, competitors_svg
from dflop.report.worth import WorthInputs
from tests.report.runs import HOSTILE
from tests.report.test_html import Page

COLUMNS = ("model", "data", "default", "dflop", "bound", "idle")
ROWS = [("a model", "main", "0.9x", "1.5x", "2.0x", "10 %"), (HOSTILE, "heavy", "0.8x", "1.6x", "2.1x", "11 %")]
BARS = (Series("default", (0.9, 0.8)), Series("dflop", (1.5, 1.6), low=(1.4, 1.5), high=(1.6, 1.7)))
GIVEN = WorthInputs(64, 1000, 2.0, 1.5, 1.4, 1.6, 2.5, 0.0)


def comparison(**changes: object) -> ComparisonPage:
    """A page with everything, its columns shared out to two tables."""
    keys = {"model", "data"}
    content = {
        "title": "dflop on paper",
        "subtitle": "Suite of two",
        "verdict": f"faster {HOSTILE}",
        "numbers": (("speed-up, simulated", "1.55x", "geometric mean"),),
        "drawings": (
            Drawing(bars_svg("bars", "bars", ("one", "two"), BARS, (2.0, 2.1)), "wide one", is_wide=True),
            Drawing(competitors_svg("rows", "rows", [(HOSTILE, 1.2, 1.1, 1.3)], 2.0), "small one"),
        ),
        "tables": (
            split_table("Speed-ups", COLUMNS, ROWS, {"default", "dflop", "bound"}, keys),
            split_table("The rest", COLUMNS, ROWS, {"idle"}, keys, "a note"),
        ),
        "notes": ("simulated: every number",),
        "facts": (("command", "dflop compare --suite two"),),
        "calculator": make_calculator(GIVEN, {}),
    }
    return ComparisonPage(**(content | changes))


def test_shows_everything_and_nothing_of_it_is_markup() -> None:
    html = render_comparison(comparison())
    page = Page(html)
    assert page.open == []
    assert page.tags.count("script") == 1
    assert page.tags.count("svg") == 2
    for text in (
        "dflop on paper",
        f"faster {HOSTILE}",
        "simulated: every number",
        "dflop compare --suite two",
        "a note",
    ):
        assert text in page.text
    assert not re.search(r'\b(src|srcset|action)=|@import|url\((?!#)|href="(?!#)', html)
    assert not re.search(r"<[^<>]*\sstyle=", html)


def test_a_split_table_keeps_what_a_row_is_about() -> None:
    first, second = comparison().tables
    assert first.header == ("model", "data", "default", "dflop", "bound")
    assert second.header == ("model", "data", "idle")
    assert second.rows[1] == (HOSTILE, "heavy", "11 %")
    assert second.text_columns == {"model", "data"}
