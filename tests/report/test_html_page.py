"""Pages as such: what is allowed in them, and that all that a page of a comparison has is shown as text."""

import base64
import hashlib
import re
from dataclasses import replace
from html import unescape

from dflop.report.competitor_bars import competitor_bars
from dflop.report.html_page import TEMPLATES, Drawing, Page, Section, render_page
from dflop.report.tables import Table
from tests.report.runs import HOSTILE
from tests.report.test_run_page import Page as Parsed
from tests.report.test_run_page import assert_sound

ROWS = [(HOSTILE, 1.2, 1.1, 1.3)]
TABLE = Table("The rest", ("model", "idle"), ((HOSTILE, "10 %"), ("other", "11 %")), frozenset({"model"}), "a note")


def comparison() -> Page:
    """A page as comparisons have it, with everything."""
    drawings = (
        Drawing(competitor_bars("a", "a", ROWS, 2.0, "times as fast").svg(), "wide one", is_wide=True),
        Drawing(competitor_bars("b", "b", ROWS, 2.0, "times as fast").svg(), "small one"),
    )
    return Page(
        title="dflop on paper",
        subtitle="Suite of two",
        kinds=("simulated",),
        verdict=f"faster {HOSTILE}",
        numbers=(("speed-up, simulated", "1.55x", "geometric mean"),),
        sections=(
            Section("speedups", "Speed-ups", drawings=drawings, tables=(TABLE, replace(TABLE, rows=(), title="gone"))),
            Section("how", "How to read this", notes=("simulated: every number", HOSTILE)),
            Section("reproduce", "To reproduce", facts=(("command", "dflop compare two.yaml"),)),
        ),
    )


def test_shows_everything_and_nothing_of_it_is_markup() -> None:
    html = render_page(comparison())
    page = Parsed(html)
    assert_sound(page, html)
    assert page.tags.count("svg") == 2
    for text in (
        "dflop on paper",
        f"faster {HOSTILE}",
        "simulated: every number",
        "dflop compare two.yaml",
        "a note",
    ):
        assert text in page.text
    assert "gone" not in page.text, "a table without rows that says nothing about it"


def test_rows_beyond_those_shown_are_folded() -> None:
    table = replace(TABLE, num_shown=1)
    text = Parsed(render_page(replace(comparison(), sections=(Section("a", "A", tables=(table,)),)))).text
    assert text.index("10 %") < text.index("1 more") < text.index("11 %")


def test_the_policy_allows_the_style_of_the_page_and_nothing_else() -> None:
    html = render_page(comparison())
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', html)[1])
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert style == (TEMPLATES / "page.css").read_text()
    assert "</" not in style, "it stands inside an element"
