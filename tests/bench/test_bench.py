"""Documents say what the results say; parts start; a part that fails or misses a bound is reported."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.bench.figures import RESULTS, ROOT, slug
from tests.bench.pages import SHOWN, documents, filled, generated, newest, results
from tests.bench.parts import PARTS, chosen


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_say_what_was_measured(path):
    text = path.read_text()
    assert filled(text, generated(SHOWN, RESULTS), path) == text, "run python -m tests.bench.pages"


def test_every_result_is_where_its_machine_and_date_say():
    found = list(results(RESULTS))
    assert {part for part, _, _ in SHOWN} <= {result.part for result in found}
    for result in found:
        about = result.content["machine"]
        assert (result.machine, result.date) == (slug(about), about["date"]), result.path


@pytest.mark.parametrize("module", sorted({part.module for part in PARTS}))
def test_a_part_starts_and_knows_its_options(module, monkeypatch, capsys):
    command = importlib.import_module(module)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delattr(os, "execve")  # options first, then another process
    with pytest.raises(SystemExit) as ended:
        command.main()
    usage = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--json" in usage
    args = {word for part in PARTS if part.module == module for word in (*part.args, *(part.subset or ()))}
    assert {word for word in args if word.startswith("--")} <= set(usage.replace(",", " ").replace("]", " ").split())


def test_the_subset_takes_twenty_minutes_at_most_and_has_other_names():
    subset = chosen(None, False)
    assert 0 < sum(part.minutes_of(False) for part in subset) <= 20
    assert {part.result_name(False) for part in subset if part.args != part.subset} == {
        f"{part.name}-subset" for part in subset if part.args != part.subset
    }
    assert [part.name for part in PARTS if part not in chosen(None, True)] == ["launch-slurm"]
    assert [part.name for part in chosen(["launch-slurm"], False)] == ["launch-slurm"]


@pytest.mark.parametrize("text", ["<!-- table b -->\n<!-- end -->\n", "<!-- table a -->\n", "text\n<!-- end -->\n"])
def test_a_document_with_a_wrong_marker_and_a_missing_result_are_refused(text, tmp_path):
    blocks = {"a": lambda folder: f"one of {folder.name}"}
    good = "<!-- table a -->\n2\n<!-- end -->\n"
    assert filled(good, blocks, Path("docs/a.md")) == "<!-- table a -->\n\none of docs\n\n<!-- end -->\n"
    with pytest.raises(ValueError, match=r"docs/a.md.*(no table is called `b`|lacks its other half)"):
        filled(text, blocks, Path("docs/a.md"))
    with pytest.raises(ValueError, match=r"has no result of `store`: run python -m tests.bench --full --part store"):
        newest(tmp_path, "store", "a")
