import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dflop.report.run_page import render_report, run_facts, run_page
from dflop.report.run_tables import key_numbers
from dflop.report.summary import RunSummary
from tests.builders import make_cluster, make_plan
from tests.report.runs import HOSTILE, make_run

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Open tags as a tree walk, so that an unclosed or stray tag fails, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        """Attributes that a browser would run, or that give a tag a style."""
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
        self.ids += [name for name in [dict(attrs).get("id")] if name]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += " ".join(data.split()) + "\n"


def assert_sound(page: Page, html: str) -> None:
    """Nothing of a user became markup, nothing runs, nothing is loaded, nothing has a style of its own."""
    assert page.open == []
    assert not {"script", "b", "link", "img"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids)), "every id once"
    assert not re.search(r'\b(src|srcset|action)=|@import|url\((?!#)|href="(?!#)', html)
    assert page.handlers == []
    assert len(html.encode()) < 1_500_000


@pytest.fixture(scope="module")
def full(run: RunSummary) -> str:
    """The page of a run with everything."""
    return render_report(run)


def test_hostile_shapes_decisions_and_configurations_are_text(full: str, run: RunSummary) -> None:
    page = Page(full)
    assert_sound(page, full)
    hostile = ("/data/<script>.jsonl", "30 % slower on <b>host1</b>", "</pre><script>alert(1)</script>", HOSTILE)
    sections = (
        run.verdict, "vision dp2 | audio dp1 | llm pp2 dp1", "speedup, simulated", "truncated JPEG: 812 of 4096 bytes",
        "1.30x", "cfgkey", "2x core", "torch 2", "abc123", "store snapshot", 'dflop sql "select * from v_run_summary"',
        "model FLOPs utilisation", "fastest of 38 layouts", "vision tp1 measured", "4 more",
        "Error by size of the microbatch", "Slow ranks", "512.0 MiB", "tensors, measured",
        "hours of processes", "read by train", "snapshot 3, revision rev", "1:02:05",
    )  # fmt: skip
    assert [text for text in (*hostile, *sections) if text not in page.text] == []
    lines = " | ".join(page.text.split("\n"))
    assert "llm tp1: forward of a layer | 1.5 ms | 2.5 ms | measured" in re.sub(r"[ |]* \| ", " | ", lines)
    assert "llm tp1: kept by a layer | - | 3.0 MiB | measured" in re.sub(r"[ |]* \| ", " | ", lines)
    assert {section.id for section in run_page(run).sections} <= set(page.ids)
    assert page.text.index("Cost corrections") < page.text.index("0:01:15") < page.text.index("30 % slower")


@pytest.fixture(scope="module")
def empty() -> RunSummary:
    """A run that failed before its first step."""
    return RunSummary(run=make_run("failed"), cluster=make_cluster(), plan=make_plan({"llm": 1}), train=[])


def test_without_comparison_and_without_steps(empty: RunSummary, run: RunSummary) -> None:
    page = Page(render_report(replace(run, compare=(), compare_plans=())))
    assert "No global batch was trained under both policies." in page.text
    assert "This run has no comparison with steps in arrival order." in page.text
    html = render_report(empty)
    assert render_report(empty) == html
    page = Page(html)
    assert_sound(page, html)
    assert page.tags.count("svg") == 0
    for text in (
        "No microbatch was both predicted and measured.", "The plan has no memory predictions.",
        "No training step was observed.", "None: every sample is valid.", "No step was measured",
        "No events are recorded for this run.",
    ):  # fmt: skip
        assert text in page.text


def test_facts_of_a_run(run: RunSummary) -> None:
    facts = dict(run_facts(run))
    assert facts["run"] == "demo, done"
    assert facts["optimizer steps"] == "24 of 24, of 16 samples each"
    assert facts["processes"] == f"5, {run.num_cores} at a time: vision dp2 | audio dp1 | llm pp2 dp1"
    assert facts["model"] == "tiny"
    shown = [label for label, _, remark in key_numbers(run) if remark == "measured, median over steps"]
    assert shown == ["model FLOPs utilisation"]
    assert "model FLOPs utilisation" not in [label for label, *_ in key_numbers(replace(run, flops=()))]
    found = sorted(1e12 / (4e13 * s.step_s) for s in run.steps)
    assert run.mfu == pytest.approx((found[11] + found[12]) / 2)
    flops = tuple(replace(f, peak_flops_per_s=math.nan) for f in run.flops)
    assert math.isnan(replace(run, flops=flops).mfu)
