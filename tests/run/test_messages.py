import io
import sys

import pytest

from dflop.progress import counted
from dflop.run import messages
from dflop.run.messages import PROGRESS_LINE, Meter


def told(seconds_each: float, num_items: int = 20) -> list[str]:
    lines, now_s = list[str](), [0.0]
    meter = Meter(lines.append, clock=lambda: now_s[0], is_terminal=False)
    for expected, item in enumerate(counted(range(num_items), "simulating plans", meter)):
        assert item == expected
        now_s[0] += seconds_each
    return lines


def test_a_log_has_a_line_per_tenth_with_the_time_to_go() -> None:
    lines = told(3.0)
    assert lines[0] == "simulating plans: 2 of 20 (10%), 54.00 s to go"
    assert lines[-1] == "simulating plans: 20 of 20 (100%), took 1 min 0 s"
    assert len(lines) == 10
    assert all(PROGRESS_LINE.match(line) for line in lines)


@pytest.mark.parametrize("num_items", [0, 1, 20])
def test_what_is_over_in_a_moment_says_nothing(num_items: int) -> None:
    assert told(0.1, num_items) == []


def test_each_kind_of_work_has_its_own_clock() -> None:
    lines, now_s = list[str](), [100.0]
    meter = Meter(lines.append, clock=lambda: now_s[0], is_terminal=False)
    for what in ("reading", "writing"):
        for _ in counted("ab", what, meter):
            now_s[0] += 10.0
    assert [line for line in lines if "(50%)" in line] == [
        f"{x}: 1 of 2 (50%), 10.00 s to go" for x in ("reading", "writing")
    ]


def test_a_terminal_has_one_line_that_changes_ten_times_a_second_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = [0.0]
    meter = Meter(lambda line: None, clock=lambda: now_s[0], is_terminal=True)
    for _ in counted(range(100), "drawing", meter):
        now_s[0] += 0.01
    drawn = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert drawn[0] == "drawing: 1 of 100 (1%), 990.0 ms to go"
    assert drawn[-1] == "drawing: 100 of 100 (100%), took 1.00 s\n"
    assert len(drawn) in (11, 12)


def test_a_line_on_a_terminal_takes_the_place_of_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    meter = Meter(messages.say)
    meter("drawing", 0, 2)
    meter("drawing", 1, 2)
    messages.say("a plan")
    assert shown.getvalue().endswith("to go\r\x1b[Ka plan\n")
    assert Meter(lambda line: None).is_drawn is False, "a caller's own lines are no terminal"
