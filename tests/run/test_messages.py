import pytest

from dflop.run.messages import progress


def told(seconds_each: float, num_items: int = 20) -> list[str]:
    lines, now_s = list[str](), [0.0]
    items = progress(
        list(range(num_items)), "simulating plans", lines.append, clock=lambda: now_s[0], is_terminal=False
    )
    for expected, item in enumerate(items):
        assert item == expected
        now_s[0] += seconds_each
    return lines


def test_a_log_has_a_line_per_tenth_with_the_time_to_go() -> None:
    lines = told(3.0)
    assert lines[0] == "simulating plans: 2 of 20 (10%), 54.00 s to go"
    assert lines[-1] == "simulating plans: 20 of 20 (100%), took 1 min 0 s"
    assert len(lines) == 10


@pytest.mark.parametrize("num_items", [0, 1, 20])
def test_what_is_over_in_a_moment_says_nothing(num_items: int) -> None:
    assert told(0.1, num_items) == []


def test_a_terminal_has_one_line_that_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress("ab", "drawing", lambda line: None, clock=lambda: 0.0, is_terminal=True)) == ["a", "b"]
    assert capsys.readouterr().err.split("\r\x1b[K")[1:] == [
        "drawing: 1 of 2 (50%), 0 us to go", "drawing: 2 of 2 (100%), took 0 us\n",
    ]  # fmt: skip
