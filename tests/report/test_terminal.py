import io
from dataclasses import replace

from rich.console import Console

from dflop.report.summary import RunSummary
from dflop.report.terminal import markdown_summary, print_summary


def printed(run: RunSummary, width: int = 100) -> list[str]:
    out = io.StringIO()
    print_summary(run, Console(file=out, width=width, no_color=True))
    return out.getvalue().splitlines()


def test_fits_100_columns_and_ends_with_the_line_that_opens_the_store(run: RunSummary) -> None:
    lines = printed(run)
    assert max(map(len, lines)) <= 100
    assert lines[-1] == printed(run, width=30)[-1] == 'dflop sql "select * from v_run_summary"', "never wrapped"
    assert any(line.startswith(run.verdict.partition(":")[0]) for line in lines)
    assert not any("…" in line for line in lines)
    for word in ("arrival", "vision pp0", "fwd+bwd simulated", "Cost corrections"):
        assert any(word in line for line in lines), word


def test_ids_are_never_read_as_console_markup(run: RunSummary) -> None:
    named = replace(run, run=replace(run.run, run_id="[red]x[/nope]"))
    assert any("[red]x[/nope]" in line for line in printed(named))


def test_markdown_cells_stay_cells(run: RunSummary) -> None:
    lines = markdown_summary(run).splitlines()
    hostile = next(line for line in lines if line.startswith("| clip-93"))
    assert hostile.replace("\\|", "").count("|") == 5
    assert "\\[x\\]" in hostile
    assert not any("<script" in line or "<b>" in line for line in lines)
    assert f"**{run.verdict}**" in lines
