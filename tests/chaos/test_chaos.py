"""That a campaign can fail: by ends that no fault explains, commands that hang, and what is checked in the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflop.jobs import runs
from dflop.jobs.rundir import RunDir
from dflop.records import StepObservation, StepPlan
from dflop.store.spool import SpoolWriter
from tests.chaos import campaign, checks, play, slurm_faults, strikes
from tests.chaos.campaign import AGAIN, ITSELF, MENDED, NOT_STRUCK, WRONG, Struck
from tests.chaos.faults import MOMENTS, End, Fault
from tests.chaos.play import Ended, Play
from tests.chaos.stage import NUM_STEPS
from tests.jobs.configs import make_config

ALL = (*campaign.FAULTS, *(fault for fault in slurm_faults.FAULTS if fault.part == "slurm"))
COMMAND = """
import pathlib, signal, sys
is_first = not pathlib.Path("begun").exists()
pathlib.Path("begun").touch()
print("dflop: works", flush=True)
if pathlib.Path("broken").exists():
    sys.exit("dflop: CURRENT is damaged")
if is_first:
    signal.pause()
"""
"""Waits to be ended the first time, works the second time, and refuses where something is broken."""


def test_faults_are_drawn_again_by_their_seed_and_strike_where_there_is_something(tmp_path: Path) -> None:
    assert len({fault.name for fault in ALL}) == len(ALL)
    assert {fault.when for fault in ALL} <= MOMENTS.keys()
    drawn = [[s.fault.name for s in campaign.draw(3, number)[0]] for number in range(50)]
    assert drawn == [[s.fault.name for s in campaign.draw(3, number)[0]] for number in range(50)]
    assert len({name for names in drawn for name in names}) >= 0.9 * len(campaign.FAULTS)
    places = [fault.dies_at for fault in ALL if fault.dies_at]
    code = f"from tests.chaos.dying import arm\nfor place in {places}: arm(place)"
    assert Play(tmp_path, random.Random(0), ()).also("-c", code).wait() == 0


DEEDS: dict[str, Callable[[Play], object]] = {
    "kill": lambda play: play.send(9),
    "break": lambda play: (play.folder / "broken").touch(),
    "repair": lambda play: (play.folder / "broken").unlink(),
    "absent": lambda play: strikes.newest(play, "nothing"),
    "nothing": lambda play: play,
}


def fault(when: str, what: str, *ends: End) -> Fault:
    return Fault(what, when, DEEDS[what], ends)


KILL, REPAIRED = fault("working", "kill", End(-9)), End(1, "is damaged", DEEDS["repair"])


@pytest.mark.parametrize(
    ("faults", "wrong", "outcomes"),
    [
        ([KILL], [], [AGAIN]),
        ([fault("between", "break", REPAIRED)], [], [MENDED]),
        ([KILL, fault("before", "absent")], [], [AGAIN, NOT_STRUCK]),
        ([KILL, fault("before", "nothing")], [], [AGAIN, ITSELF]),
        ([KILL], ["a sample is lost"], [WRONG]),
        ([fault("working", "kill")], ["command 0 ended with -9, no fault does that: dflop: works"], [WRONG]),
        ([fault("before", "break", End(5, "is damaged"))],
         ["command 0 ended with 1, no fault does that: dflop: CURRENT is damaged"], [WRONG]),
        ([], ["command 0 hangs after 1 s"], []),
    ],
)  # fmt: skip
def test_a_run_ends_as_its_faults_and_checks_say(
    faults: list[Fault], wrong: list[str], outcomes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_working(play: Play, _roll: float) -> bool:
        return "dflop: works" in play.log.read_text()

    monkeypatch.setattr(play, "DFLOP", ("-c", COMMAND))
    monkeypatch.setitem(MOMENTS, "working", is_working)
    monkeypatch.setitem(MOMENTS, "between", is_working)
    monkeypatch.setattr(campaign.stage, "copy_stage", lambda *_: None)
    monkeypatch.setattr(campaign.checks, "problems", lambda *_: [x for x in wrong if x == "a sample is lost"])
    monkeypatch.setattr(campaign, "LIMIT_S", campaign.LIMIT_S if faults else 1.0)
    struck = [Struck(f, 0.0) for f in faults]
    found = campaign.play_run(tmp_path, tmp_path, struck, random.Random(2), None, {})["problems"]
    assert [of.outcome for of in struck] == outcomes
    assert [problem[: len(words)] for problem, words in zip(found, wrong, strict=True)] == wrong


def observed(step: int, rank: int, *, attempt: int = 1, loss: float = 1.0) -> StepObservation:
    zero, one = (0.0,) * 4, (1.0,) * 3
    return StepObservation("", attempt, step, "dflop", rank, "llm", 0, 0, *one, *zero, loss, 1.0, 10, 0.0, ())


def planned(step: int) -> StepPlan:
    first = 8 * (step % 2)
    return StepPlan("", step, "dflop", tuple(range(first, first + 8)), 1, (), 10, 1.0, 1.0)


def test_what_is_wrong_with_a_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = runs.begin(make_config(tmp_path))
    steps, play = range(NUM_STEPS), Play(tmp_path, random.Random(0), ())

    def found(num_processes: int, samples: range, records: list[Any]) -> list[str]:
        with SpoolWriter(run.config().store, "run", "test") as spool:
            for record in records:
                spool.append(replace(record, run_id=run.run_id))
        monkeypatch.setattr(RunDir, "plan", lambda _run: SimpleNamespace(num_processes=num_processes))
        steps_found = checks.of_steps(run, dict.fromkeys(steps, 1.0))
        return [*steps_found, *checks.of_epochs(run, set(samples)), *checks.of_commands(play, 0.0)]

    seen = [observed(step, rank) for step in steps for rank in range(2)]
    assert found(2, range(16), [*seen, *map(planned, steps), observed(3, 1, attempt=2)]) == []
    play.ended = [Ended(7, ""), Ended(1, "Traceback (most recent call last):\n  x\nKeyError: 'a'")]
    process = play.also("-c", "import signal; signal.pause()")
    wrong = found(3, range(1, 17), [observed(3, 1), observed(4, 1, attempt=2, loss=1.01)])
    play.end_all()
    words = ["are there twice: [(1, 3, 1)]", "are missing: [(0, 2), ", "step 4 has loss"]
    words += [f"epoch {epoch}: samples [16] are not trained exactly once" for epoch in range(NUM_STEPS // 2)]
    words += ["ended with 7", "KeyError: 'a'", f"process {process.pid} is"]
    assert [word in problem for word, problem in zip(words, wrong, strict=True)] == [True] * len(words)
