from __future__ import annotations

import io
import math
from dataclasses import replace

from rich.console import Console

from dflop.report.tables import MAX_ROWS, layout_text, plan_table, quarantine_table
from dflop.report.terminal import markdown_plan, markdown_summary, print_summary
from tests.builders import make_inline_plan, make_plan
from tests.report.runs import realistic


def printed(compare: bool = True, width: int = 100) -> list[str]:
    out = io.StringIO()
    print_summary(realistic(compare=compare), Console(file=out, width=width, no_color=True))
    return out.getvalue().splitlines()


def test_fits_100_columns_and_ends_with_the_line_that_opens_the_store() -> None:
    lines = printed()
    assert max(map(len, lines)) <= 100
    assert lines[-1] == printed(width=30)[-1] == 'dflop sql "select * from v_run_summary"', "never wrapped"
    assert any(line.startswith("Balanced won: ") for line in lines)
    assert not any("…" in line for line in lines)
    for word in ("data-blind", "vision pp0", "fwd+bwd simulated", "Corrections learnt"):
        assert any(word in line for line in lines), word


def test_without_comparison() -> None:
    lines = printed(compare=False)
    assert any(line.startswith("Not compared: ") for line in lines)
    assert not any("both policies" in line for line in lines)


def test_ids_are_never_read_as_console_markup() -> None:
    out = io.StringIO()
    summary = realistic()
    print_summary(replace(summary, run=replace(summary.run, run_id="[red]x[/nope]")), Console(file=out, width=100))
    assert "[red]x[/nope]" in out.getvalue()


def test_markdown_cells_stay_cells() -> None:
    lines = markdown_summary(realistic()).splitlines()
    hostile = next(line for line in lines if line.startswith("| clip-93"))
    assert hostile.replace("\\|", "").count("|") == 5
    assert "\\[x\\]" in hostile
    assert not any("<script" in line or "<b>" in line for line in lines)
    assert any(line.startswith("**Balanced won") for line in lines)


def test_markdown_plan_is_one_table_row_per_candidate() -> None:
    lines = markdown_plan(realistic().candidates).splitlines()
    rows = [line for line in lines if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 0", "| 1", "| 2"]
    assert "vision dp2 \\| audio dp1 \\| llm pp1 dp1" in rows[0]
    assert "fastest of 38 layouts" in rows[0]


def test_layout_text_shows_what_was_chosen_and_how_modules_run() -> None:
    assert layout_text(make_plan({"llm": 2, "vision": 1}, llm_pp=2)) == "vision dp1 | llm pp2 dp2"
    assert layout_text(make_plan({"vision": 2, "llm": 1}, encoder_pp=2)) == "vision pp2 dp2 | llm pp1 dp1"
    plan = make_plan({"vision": 2, "llm": 1})
    vision, llm = plan.modules
    ways = (replace(vision, recompute=True), replace(llm, recompute=True, shard_optimizer=True))
    assert layout_text(replace(plan, modules=ways)) == "vision dp2 recompute | llm pp1 dp1 recompute ZeRO-1"
    inline = make_inline_plan(8, pp=4, tp=2)
    assert layout_text(inline) == "inline tp2 pp4 dp8"
    ways = tuple(replace(m, shard_optimizer=True) for m in inline.modules)
    assert layout_text(replace(inline, modules=ways)) == "inline tp2 pp4 dp8 ZeRO-1"


def test_plan_table_counts_the_processes_of_a_chain_once_and_knows_the_uniform_plan() -> None:
    plan = replace(make_inline_plan(4, pp=2), uniform_step_s=0.25)
    table = plan_table([plan, replace(plan, uniform_step_s=math.nan)])
    (row, unknown), header = table.rows, table.header
    assert (row[header.index("processes")], row[header.index("uniform simulated")]) == ("8", "250.0 ms")
    assert unknown[header.index("uniform simulated")] == "-"


def test_long_lists_are_cut_and_say_so() -> None:
    summary = realistic()
    table = quarantine_table(replace(summary, quarantined=summary.quarantined[:1] * (MAX_ROWS + 7)))
    assert len(table.rows) == MAX_ROWS
    assert table.note == '7 more: dflop sql "select * from v_quarantine"'
