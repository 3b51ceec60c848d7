"""Documents say what the results say, and what makes them say it notices what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.campaign import RESULTS
from tests.bench.figures import ROOT, slug
from tests.bench.pages.fill import CLOSING, OPENING, documents, filled, generated, wrapped
from tests.bench.pages.results import PagesError, Result, newest, overview, results
from tests.bench.pages.shown import SHOWN, Shown

BLOCKS = {"a": lambda folder: f"one of {folder.name}"}
PATH = Path("docs/page.md")


def block(name: str, text: str = "") -> str:
    return f"{OPENING}{name} -->\n{text}{CLOSING}\n"


def add(root: Path, machine: str, name: str, **content: object) -> None:
    (root / machine).mkdir(parents=True, exist_ok=True)
    about = {"cpu": "AMD EPYC", "num_cores": 2, "commit": "c0ffee" * 7, "is_dirty": False}
    (root / machine / f"{name}.json").write_text(json.dumps({"machine": about, **content}))


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_say_what_was_measured(path):
    text = path.read_text()
    assert filled(text, generated(SHOWN, RESULTS), path) == text, "run python -m tests.bench.pages"


def test_what_is_shown_stands_in_a_document():
    texts = "".join(path.read_text() for path in documents(ROOT))
    for one in SHOWN:
        names = generated([one], RESULTS).keys() - {"results"}
        assert any(f"{OPENING}{name} -->" in texts for name in names), one.part


def test_every_result_is_where_its_machine_and_date_say():
    found = list(results(RESULTS))
    assert found
    for result in found:
        about = result.content["machine"]
        assert (result.machine, result.date) == (slug(about), about["date"]), result.path


def test_a_number_that_was_changed_by_hand_is_put_right():
    prose = f"before, `{OPENING}b -->` in prose\n"
    text = prose + block("a", "two of docs\n") + "after\n"
    assert filled(text, BLOCKS, PATH) == f"{prose}{OPENING}a -->\n\none of docs\n\n{CLOSING}\nafter\n"
    assert filled(filled(text, BLOCKS, PATH), BLOCKS, PATH) == filled(text, BLOCKS, PATH)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (block("b"), "no table is called `b`; there are a"),
        (f"{OPENING}a -->\ntext\n", "lacks its other half"),
        (f"text\n{CLOSING}\n", "lacks its other half"),
        (f"{OPENING}a -->\n{block('a')}", "has no <!-- end -->"),
        (f"{OPENING}a --> {CLOSING}", "not on lines of its own"),
    ],
)
def test_a_document_with_a_wrong_marker_is_refused(text, says):
    with pytest.raises(PagesError, match=rf"docs/page.md.*{says}"):
        filled(text, BLOCKS, PATH)


def test_the_newest_of_a_machine_counts(tmp_path):
    for machine, name in (("a", "cost-2026-01-02"), ("a", "cost-2026-01-10"), ("b", "cost-2026-02-01")):
        add(tmp_path, machine, name)
    add(tmp_path, "a", "cost-subset-2026-03-01")
    assert newest(tmp_path, "cost", "a").path.name == "cost-2026-01-10.json"
    with pytest.raises(PagesError, match=r"has no result of `store`: run python -m tests.bench --full --part store"):
        newest(tmp_path, "store", "a")


def test_a_missing_result_and_a_name_used_twice_are_told(tmp_path):
    with pytest.raises(PagesError, match="has no result of `data`"):
        generated([Shown("data", "a", "tests.bench.data.page")], tmp_path)
    add(tmp_path, "a", "data-2026-01-01", figures=[])
    twice = [Shown("data", "a", "tests.bench.data.page")] * 2
    with pytest.raises(PagesError, match="two tables are called `data`"):
        generated(twice, tmp_path)


def test_a_table_says_where_it_comes_from(tmp_path):
    add(tmp_path / "results", "a", "cost-2026-01-02")
    result = Result(tmp_path / "results" / "a" / "cost-2026-01-02.json")
    link = "*[cost-2026-01-02.json](../results/a/cost-2026-01-02.json): 2 cores of AMD EPYC, 2026-01-02"
    assert result.source(tmp_path / "docs") == f"{link}, commit c0ffeec0ff*"
    result.path.with_suffix(".svg").touch()
    assert result.source(tmp_path / "docs").endswith("; [picture](../results/a/cost-2026-01-02.svg)*")


def test_the_overview_has_the_newest_of_every_part_with_bounds_where_they_are_known(tmp_path):
    add(tmp_path, "a", "cost-2026-01-02", num_bounds=3, missed=["x"], command="python -m cost --sizes TABLE")
    add(tmp_path, "b", "cost-2026-01-01")
    add(tmp_path, "b", "chaos-2026-01-01")
    add(tmp_path, "b", "of-old-2026-01-01")
    head, _, chaos, cost, unknown = overview(tmp_path, tmp_path).splitlines()
    assert head == "| file | machine | what | command | bounds met |"
    assert chaos.startswith("| [chaos-2026-01-01.json](b/chaos-2026-01-01.json) | b |")
    assert chaos.endswith("| b | whole runs under faults drawn by lot |  |  |")
    assert unknown == "| [of-old-2026-01-01.json](b/of-old-2026-01-01.json) | b |  |  |  |"
    assert cost.endswith("| a | fitting and predicting costs | `python -m cost --sizes TABLE` | 2 of 3 |")


def test_prose_is_wrapped_and_rows_are_not():
    row, prose = "| " + "cell " * 40 + "|", "word " * 40
    lines = wrapped(f"{row}\n\n{prose}").splitlines()
    assert lines[0] == row
    assert max(map(len, lines[1:])) <= 120
    assert " ".join(lines[2:]).split() == prose.split()
