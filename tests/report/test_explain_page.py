"""An explanation as people read it: every number with its unit, nothing cut off, simulated and with its source."""

import io
import json
import re
from dataclasses import replace
from html import unescape

import pytest
from rich.console import Console

from dflop.plan.search import plan_problem
from dflop.report import explain_page
from dflop.report.explain_page import (
    MAX_CANDIDATES,
    Explanation,
    explanation_json,
    explanation_page,
    explanation_tables,
    paragraph,
    print_explanation,
)
from dflop.report.html_page import render_page
from dflop.report.plots import Picture
from dflop.report.tables import layout_text, plan_table
from dflop.views.explain_plan import explain_plan
from tests.plan.problems import make_problem

SOURCE = "analytic, X100"


@pytest.fixture(scope="module")
def found() -> Explanation:
    problem = make_problem("vision", num_processes=4, optimizer_s_per_param=1e-9, microbatches=(3, 4, 6))
    return explain_plan(problem, plan_problem(problem), lambda _: None)


def printed(found: Explanation, **console: object) -> str:
    out = io.StringIO()
    print_explanation(found, SOURCE, Console(file=out, **console))  # type: ignore[arg-type]  # keywords of a test
    return out.getvalue()


def test_a_log_gets_whole_lines(found: Explanation) -> None:
    text = printed(found, width=40)
    lines = text.splitlines()
    assert "…" not in text
    assert paragraph(found) in lines
    for plan in found.plans[:MAX_CANDIDATES]:
        assert any(layout_text(plan) in line and f" {plan.num_microbatches} " in line for line in lines)
    for limit in found.limits:
        assert any(limit.name in line and limit.text in line for line in lines)
    for name in ("half the node", "one node more", "half the batch", "double the batch", "double the memory"):
        assert any(line.startswith(name) for line in lines)


def test_candidates_beyond_the_first_ones_are_counted(found: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert " more" not in printed(found).partition("Candidates")[2].partition("limit")[0]
    monkeypatch.setattr(explain_page, "MAX_CANDIDATES", 1)
    assert f"{len(found.plans) - 1} more" in printed(found)


def test_it_says_that_it_is_simulated_and_where_costs_come_from(found: Explanation) -> None:
    last = printed(found).splitlines()[-1]
    assert last.startswith(f"Simulated; costs {SOURCE} (")
    for m in found.plans[0].modules:
        assert f"{m.module} tp{m.parallel.tp} analytic" in last


def test_the_paragraph_says_what_binds(found: Explanation) -> None:
    binding = [limit.name for limit in found.limits if limit.is_binding]
    assert binding
    assert f"At or near the limit: {', '.join(binding)}." in paragraph(found)
    free = replace(found, limits=tuple(replace(limit, used_frac=0.5) for limit in found.limits))
    assert "No limit is close." in paragraph(free)
    seated = replace(found, time=replace(found.time, unused_frac=0.0))
    assert "of the GPUs are unused" not in paragraph(seated)
    assert "25.0 % of the GPUs are unused" in paragraph(replace(found, time=replace(found.time, unused_frac=0.25)))


def test_per_gpu_counts_gpus_without_a_seat(found: Explanation) -> None:
    base = found.variations[0]
    twice = replace(base, name="twice the GPUs, the same step", num_gpus=2 * base.num_gpus)
    both = replace(found, variations=(base, twice))
    assert json.loads(explanation_json(both, SOURCE))["variations"][1]["relative"] == pytest.approx(0.5)
    line = next(line for line in printed(both).splitlines() if line.startswith("twice the GPUs"))
    assert "0.50x" in line
    assert "uses 4 of 8 GPUs" in line
    tables = {table.title: table for table in explanation_tables(replace(found, variations=(twice,)))}
    said = [f"{layout_text(plan)}, uses {plan.num_processes} of 8 GPUs" for plan in found.plans]
    assert [row[1] for row in tables["Candidates, simulated"].rows] == said[:MAX_CANDIDATES]
    assert [row[1] for row in plan_table(found.plans, num_gpus=8).rows] == said
    assert [row[1] for row in plan_table(found.plans).rows] == [layout_text(plan) for plan in found.plans]


def test_a_page_says_what_the_tables_say(found: Explanation) -> None:
    picture = Picture("plan", "a step", (2.0, 1.0), lambda figure: None)
    numbers = (("speed", "9 tokens/s/GPU", ""),)
    html = render_page(explanation_page(found, SOURCE, "dflop plan run.yaml --html p.html", numbers, picture))
    text = unescape(re.sub(r"<[^>]+>", " ", html))
    cells = [cell for table in explanation_tables(found) for row in table.rows for cell in row]
    expected = (paragraph(found), SOURCE, "dflop plan run.yaml --html p.html", "docs/glossary.md", *filter(None, cells))
    assert [words for words in expected if words not in text] == []
    assert html.count("<svg") == 1
