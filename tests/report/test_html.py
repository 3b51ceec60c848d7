from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflop.report.history import HistoryEntry
from dflop.report.html import render_report, write_report
from dflop.report.summary import summarise
from tests.builders import make_cluster, make_plan
from tests.report.runs import HOSTILE, make_run, realistic

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Open tags as a tree walk, so that an unclosed or stray tag fails, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += " ".join(data.split()) + "\n"


def test_contains_everything() -> None:
    summary = realistic()
    page = Page(render_report(summary))
    assert page.open == []
    assert page.tags.count("svg") == 3
    shown = (
        summary.verdict,
        "vision dp2 | audio dp1 | llm pp1 dp1",
        "fastest of 38 layouts",
        "speedup, simulated",
        "truncated JPEG: 812 of 4096 bytes",
        "Corrections learnt",
        "1.18x",
        "cfgkey",
        "2x core",
        "torch 2",
        "abc123",
        "store snapshot",
        'dflop sql "select * from v_run_summary"',
    )
    for text in shown:
        assert text in page.text, text


def test_hostile_ids_are_text() -> None:
    page = Page(render_report(realistic()))
    assert HOSTILE in page.text
    assert "script" not in page.tags
    assert "b" not in page.tags


def test_tells_the_history_below_the_corrections() -> None:
    told = [
        HistoryEntry(0.0, None, None, "run", "demo", "running", None, None, "dflop abc", 1000.0),
        HistoryEntry(75.0, 9, 0, "drift_cost", "llm", "noticed", None, None, "<script>1.8x</script>", 1075.0),
    ]
    page = Page(render_report(realistic(), told))
    assert page.open == []
    assert "script" not in page.tags
    assert page.text.index("Corrections learnt") < page.text.index("History") < page.text.index("<script>1.8x")
    assert "0:01:15" in page.text
    assert "Nothing is known of how this run went." in Page(render_report(realistic())).text


def test_loads_nothing() -> None:
    html = render_report(realistic())
    assert not re.search(r'\b(src|srcset|action)=|@import|url\((?!#)|href="(?!#)', html)


def test_without_comparison_and_without_steps() -> None:
    page = Page(render_report(realistic(compare=False)))
    assert page.tags.count("svg") == 1
    assert "This run has no comparison with data-blind steps." in page.text
    empty = summarise(run=make_run("failed"), cluster=make_cluster(), plan=make_plan({"llm": 1}), train=[])
    page = Page(render_report(empty))
    assert page.tags.count("svg") == 0
    assert "No training step was observed." in page.text
    assert "None: every sample was usable." in page.text


def test_is_deterministic() -> None:
    assert render_report(realistic()) == render_report(realistic())


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, realistic())
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflop.report.html.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(path, realistic(compare=False))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
