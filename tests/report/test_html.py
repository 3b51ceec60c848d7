from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflop.report.html import CONTENTS, render_report, write_report
from dflop.report.run_details import RunDetails
from dflop.report.summary import RunSummary, summarise
from tests.builders import make_cluster, make_plan
from tests.report.runs import HOSTILE, make_run, realistic

NUM_SCRIPTS = 2
"""What the timeline knows, and what runs."""
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Open tags as a tree walk, so that an unclosed or stray tag fails, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.blocks: dict[str, str] = {}
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)

    def _seen(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.id = dict(attrs).get("id") or ""
        self.ids += [self.id] if self.id else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += " ".join(data.split()) + "\n"
        elif self.open and self.open[-1] == "script" and self.id:
            self.blocks[self.id] = self.blocks.get(self.id, "") + data


@pytest.fixture(scope="module")
def plain() -> str:
    """The page of a run without details."""
    return render_report(realistic())


@pytest.fixture(scope="module")
def full(run: tuple[RunSummary, RunDetails]) -> str:
    """The page of a run with everything."""
    return render_report(*run)


def test_contains_everything(plain: str) -> None:
    page = Page(plain)
    assert page.open == []
    shown = (
        realistic().verdict, "vision dp2 | audio dp1 | llm pp1 dp1", "fastest of 38 layouts", "speedup, simulated",
        "truncated JPEG: 812 of 4096 bytes", "Corrections learnt", "1.18x", "cfgkey", "2x core", "torch 2", "abc123",
        "store snapshot", 'dflop sql "select * from v_run_summary"', "Nothing is known of how this run went.", HOSTILE,
    )  # fmt: skip
    assert [text for text in shown if text not in page.text] == []
    assert page.tags.count("script") == NUM_SCRIPTS
    assert "b" not in page.tags


def test_hostile_shapes_decisions_and_configurations_are_text(full: str) -> None:
    page = Page(full)
    assert page.open == []
    assert page.tags.count("script") == NUM_SCRIPTS
    assert "b" not in page.tags
    hostile = ("/data/<script>.jsonl", "30 % slower on <b>host1</b>", "</pre><script>alert(1)</script>")
    sections = (
        "model FLOPs utilisation", "fastest of 38 layouts", "vision tp1 measured", "4 more", "Idle time per stage",
        "Balance of microbatches", "Error by size of the microbatch", "Slow ranks", "512.0 MiB",
        "Measured: what torch held on the device.", "spent once, on profiling", "read by train",
        "snapshot 3, revision rev",
    )  # fmt: skip
    assert [text for text in (*hostile, *sections) if text not in page.text] == []
    assert json.loads(page.blocks["timeline-data"])["samples"][0][0] == HOSTILE
    assert {name for name, _ in CONTENTS} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "every id once"
    assert page.text.index("Corrections learnt") < page.text.index("0:01:15") < page.text.index("30 % slower")


def test_the_policy_allows_the_page_and_nothing_else(full: str) -> None:
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', full)[1])
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", full, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"<[^>]+\s(style|on\w+)=", re.sub(r"<script>.*?</script>", "", full, flags=re.DOTALL))


def test_a_page_stays_small_and_loads_nothing(full: str, plain: str) -> None:
    assert len(full.encode()) < 1_500_000
    assert not re.search(r'\b(src|srcset|action)=|@import|url\((?!#)|href="(?!#)', plain)


@pytest.fixture(scope="module")
def empty() -> RunSummary:
    """A run that failed before its first step."""
    return summarise(run=make_run("failed"), cluster=make_cluster(), plan=make_plan({"llm": 1}), train=[])


def test_without_comparison_and_without_steps(empty: RunSummary) -> None:
    page = Page(render_report(realistic(compare=False)))
    assert "timeline-data" not in page.blocks
    assert "No global batch was trained under both policies." in page.text
    assert "This run has no comparison with data-blind steps." in page.text
    html = render_report(empty)
    assert render_report(empty) == html
    page = Page(html)
    assert page.open == []
    assert page.tags.count("svg") == 0
    assert "No microbatch was both predicted and measured." in page.text
    assert "The plan says nothing about memory." in page.text
    assert "No training step was observed." in page.text
    assert "None: every sample was usable." in page.text


def test_writing_replaces_the_file_or_keeps_it_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: RunSummary
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.html"
    path.write_text("old")
    with monkeypatch.context() as broken:
        broken.setattr("dflop.report.html_page.os.replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_report(path, empty)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_report(path, empty)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]
