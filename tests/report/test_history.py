from __future__ import annotations

import io

from rich.console import Console

from dflop import units
from dflop.report.history import COLUMNS, MAX_LINES, HistoryEntry, history_rows, history_table, markdown_history
from dflop.report.tables import correction_table
from dflop.report.terminal import print_table
from tests.report.runs import realistic


def entry(kind: str, elapsed_s: float = 0.0, **changes: object) -> HistoryEntry:
    told = {"step": None, "attempt": None, "subject": "llm", "verdict": "done", "gain_s": None, "cost_s": None}
    return HistoryEntry(
        **{**told, "elapsed_s": elapsed_s, "kind": kind, "detail": "x", "observed_at_s": 0.0, **changes}
    )


PLANNED = [entry("run", verdict="running"), entry("plan", 1.4), entry("job", 3725.4, attempt=0)]
DECIDED = [*PLANNED, entry("slow_rank", 4000.0, step=7, subject="rank 2", detail="rank 2 takes 1.30x | [x](y)")]


def test_lines_come_in_order_with_time_and_step() -> None:
    table = history_table(DECIDED)
    assert [row[:4] for row in table.rows] == [
        ("0:00:00", "", "run", "running"),
        ("0:00:01", "", "plan", "done"),
        ("1:02:05", "", "job", "done"),
        ("1:06:40", "7", "slow rank", "done"),
    ]
    assert [row[4] for row in table.rows][2:] == ["llm: x", "rank 2 takes 1.30x | [x](y)"]


def test_a_run_with_nothing_decided_says_so() -> None:
    assert "Nothing was decided" in history_table(PLANNED).note
    assert "Nothing was decided" not in history_table(DECIDED).note
    for kind in ("correction", "scheduler_late", "gate"):
        assert "Nothing was decided" not in history_table([*PLANNED, entry(kind)]).note


def test_a_long_history_shows_its_end_and_says_how_much_came_before() -> None:
    table = history_table([entry("gate", float(i)) for i in range(MAX_LINES + 12)])
    assert (len(table.rows), table.rows[0][0]) == (MAX_LINES, units.clock(12.0))
    assert "12 earlier lines" in table.note


def test_markdown_cells_stay_cells() -> None:
    lines = markdown_history(DECIDED).splitlines()
    assert lines[0] == "## History"
    hostile = next(line for line in lines if "slow rank" in line)
    assert hostile.replace("\\|", "").count("|") == 6
    assert "\\[x\\]" in hostile


def test_programs_get_every_field() -> None:
    (row,) = history_rows([entry("replan", step=3, gain_s=54.0, cost_s=20.0)])
    assert dict(zip(COLUMNS, row, strict=True))["gain_s"] == 54.0
    assert len(row) == len(COLUMNS) == 10


def test_a_table_fits_100_columns() -> None:
    out = io.StringIO()
    print_table(history_table([*DECIDED, entry("replan", detail="word " * 80)]), Console(file=out, width=100))
    assert max(map(len, out.getvalue().splitlines())) <= 100


def test_corrections_show_the_level_and_the_sizes_in_force() -> None:
    rows = [row[:6] for row in correction_table(realistic()).rows]
    assert rows == [
        ("audio", "typical mix", "10", "1.18x", "", ""),
        ("llm", "typical mix", "10", "1.18x", "", "3 of 3 sizes"),
        ("llm", "0 to 99", "", "1.18x", "0.02x", "yes"),
        ("llm", "100 to 899", "", "1.43x", "0.02x", "yes"),
        ("llm", "from 900", "", "1.68x", "0.02x", "yes"),
    ]
