from dataclasses import replace

from dflop.records import LLM, RankMemory
from dflop.report.run_tables import idle_table, memory_table, slow_rank_table
from dflop.report.summary import RunSummary
from tests.builders import make_plan, make_rank_factor


def peak(rank: int, module: str, peak_bytes: int, *, attempt: int = 1, stage: int = 0, kind: str = "allocated"):
    return RankMemory("run", attempt, 20, rank, module, stage, 0, 0, kind, peak_bytes, 0.0)


def test_idle_time_stands_side_by_side_for_both_policies(run: RunSummary) -> None:
    rows = idle_table(run).rows
    stages = ("vision pp0", "audio pp0", "llm pp0", "llm pp1")
    assert [row[:2] for row in rows] == [(stage, policy) for stage in stages for policy in ("arrival", "balanced")]
    for row in rows:
        busy, waiting, update, idle = (float(cell.split()[0]) for cell in row[2:6])
        assert abs(busy + waiting + update - 100) < 0.2
        assert abs(busy + idle - 100) < 0.2
        assert float(row[6].rstrip("x")) >= 1


def test_memory_of_a_stage_is_that_of_its_fullest_rank_in_the_last_start() -> None:
    plan = make_plan({"vision": 2, LLM: 1}, llm_pp=2)
    sized = replace(plan, modules=tuple(replace(m, stage_memory_bytes=(100,) * m.parallel.pp) for m in plan.modules))
    peaks = [peak(0, "vision", 99, attempt=1), peak(0, "vision", 70, attempt=2), peak(1, "vision", 80, attempt=2),
             peak(1, "vision", 700, attempt=2, kind="process"), peak(3, LLM, 60, stage=1, attempt=2)]  # fmt: skip
    assert memory_table(plan, 200, peaks).rows == (), "a plan that says nothing about memory"
    table = memory_table(sized, 200, peaks)
    assert table.rows == (
        ("vision pp0", "100 B", "50.0 %", "80 B", "80.0 %", "700 B"), ("llm pp0", "100 B", "50.0 %", "-", "-", "-"),
        ("llm pp1", "100 B", "50.0 %", "60 B", "60.0 %", "-"),
    )  # fmt: skip
    assert table.header[3:] == ("tensors, measured", "of the predicted", "process size, measured")


def test_slow_ranks_are_the_newest_factors_that_say_something() -> None:
    rows = slow_rank_table([
        make_rank_factor(2, 1.5, observed_at_s=1.0),
        make_rank_factor(2, 1.3, observed_at_s=2.0),
        make_rank_factor(0, 1.01, is_in_force=False),
        make_rank_factor(1, 1.2, is_in_force=False),
    ]).rows  # fmt: skip
    assert [(row[0], row[3], row[5]) for row in rows] == [("2", "1.30x", "yes"), ("1", "1.20x", "no")]
    assert slow_rank_table([make_rank_factor(0, 1.0, is_in_force=False)]).rows == ()
