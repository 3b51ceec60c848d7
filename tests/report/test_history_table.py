from __future__ import annotations

from datetime import datetime

from dflop.report.history_table import HistoryEntry, history_table


def entry(kind: str, elapsed_s: float = 0.0, **changes: object) -> HistoryEntry:
    told = {"step": None, "attempt": None, "subject": "llm", "verdict": "done", "gain_s": None, "cost_s": None}
    return HistoryEntry(
        **{**told, "elapsed_s": elapsed_s, "kind": kind, "detail": "x", "observed_at": datetime(2026, 7, 1), **changes}
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
