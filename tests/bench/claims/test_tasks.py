"""Pieces of work that claims share: done once, and not again after a death."""

from __future__ import annotations

import math

from tests.bench.claims import tasks
from tests.bench.claims.tasks import Task, revisions, run_all
from tests.bench.figures import revision


def test_tasks_run_once_each_and_say_so():
    lines = []
    task = Task(math.sqrt, (4.0,), "root")
    assert run_all([task, task], lines.append) == {task: 2.0}
    assert len(lines) == 1
    assert lines[0].startswith("[1/1")
    assert lines[0].endswith("root")


def test_what_was_done_before_a_death_is_not_done_again(monkeypatch, tmp_path):
    pieces, lines = tmp_path / "claims.pieces", []
    first, second = (Task(math.sqrt, (x,), "root") for x in (4.0, 9.0))
    run_all([first], lines.append, pieces)
    assert revisions(pieces) == [revision()]
    monkeypatch.setattr(tasks, "revision", lambda: ("later", False))
    assert run_all([first, second], lines.append, pieces) == {first: 2.0, second: 3.0}
    assert revisions(pieces) == sorted([revision(), ("later", False)], key=str), "both are told"
    assert run_all([second, first], lines.append, pieces) == {first: 2.0, second: 3.0}
    assert len(lines) == 2
