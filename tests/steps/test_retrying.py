from __future__ import annotations

import asyncio

import pytest

from dflop.errors import InfrastructureError, Interrupted, LaunchError
from dflop.steps import retrying
from dflop.steps.retrying import RETRIES, while_it_gets_on, with_retries


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "RETRY_DELAY_S", 0.0)


class Work:
    """Raises the errors one after the other, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self._errors, self.num_calls = list(errors), 0

    async def __call__(self) -> str:
        self.num_calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "done"


def test_what_the_machine_did_is_tried_again_and_said():
    said: list[str] = []
    work = Work(InfrastructureError("node1 went away\nwith a log"), InfrastructureError("lost"))
    assert asyncio.run(with_retries(work, said.append)) == "done"
    assert work.num_calls == 3
    assert said[0] == "node1 went away; tried again in 0 us, 2 more times if need be"
    assert said[1].endswith("once more if need be")
    work = Work(*(InfrastructureError(f"{i}") for i in range(9)))
    with pytest.raises(InfrastructureError, match=str(RETRIES)):
        asyncio.run(with_retries(work, str))
    assert work.num_calls == RETRIES + 1


@pytest.mark.parametrize("error", [LaunchError("a rank raised"), Interrupted("stopped"), ValueError("a fault of ours")])
def test_what_a_job_did_to_itself_is_not_tried_again(error):
    work = Work(error)
    with pytest.raises(type(error)):
        asyncio.run(with_retries(work, str))
    assert work.num_calls == 1


def goes_on(*steps: int) -> tuple[int | None, list[str]]:
    """(step at its end, what is said) of work that makes so many steps at a time and then has to stop."""
    left, at, said = list(steps), [0], list[str]()

    async def work() -> int:
        if not left:
            return at[0]
        at[0] += left.pop(0)
        raise Interrupted("told to stop: its state is on disk")

    try:
        return asyncio.run(while_it_gets_on(work, lambda: at[0], said.append)), said
    except Interrupted:
        return None, said


def test_a_job_that_gets_on_is_submitted_as_often_as_it_takes_and_one_that_gets_nowhere_twice_more():
    end, said = goes_on(*[5] * 9)
    assert (end, len(said)) == (45, 9)
    assert said[0].endswith("goes on from step 5 in another job")
    end, said = goes_on(3, *[0] * 9)
    assert (end, len(said)) == (None, 1 + RETRIES)
    assert goes_on(0, 0, 4, 0, 0, 4)[0] == 8, "chances come back with progress"
