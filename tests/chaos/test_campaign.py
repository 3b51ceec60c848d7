"""The loop of commands, strikes and mending, with a command that does in a second what it is told."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.chaos import campaign
from tests.chaos import play as play_module
from tests.chaos.campaign import AGAIN, ITSELF, MENDED, NOT_STRUCK, Result, Struck
from tests.chaos.dying import DIED, LAST_WORDS
from tests.chaos.fault import End, Fault, NothingToStrike
from tests.chaos.moments import MOMENTS
from tests.chaos.play import Ended, Play
from tests.chaos.stage import Stage

WORKS = """
import pathlib, sys, time
print("dflop: begun", flush=True)
if pathlib.Path("broken").exists():
    print("dflop: CURRENT is damaged", flush=True)
    sys.exit(4)
long = pathlib.Path("long")
seconds = float(long.read_text()) if long.exists() else SECONDS
long.unlink(missing_ok=True)
try:
    print("dflop: works", flush=True)
    time.sleep(seconds)
except KeyboardInterrupt:
    sys.exit(130)
"""
LONG_S = 60
"""Of a command that is interrupted, however busy the machine is."""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its command works for a second, or once for as long as the file `long` says, unless there is a file `broken`."""
    monkeypatch.setattr(play_module, "DFLOP", ("-c", WORKS.replace("SECONDS", "1")))
    monkeypatch.setitem(MOMENTS, "working", lambda play, _roll: "dflop: works" in play.log.read_text())
    play = Play(Stage(tmp_path), random.Random(0), ())
    yield play
    play.end_all()


def commands(play: Play, *faults: Fault) -> Result:
    result = Result(0, "train", [Struck(fault, 0.05) for fault in faults])
    assert campaign._commands(play, result) == (not result.problems)
    return result


def works_long(play: Play) -> None:
    (play.stage.folder / "long").write_text(str(LONG_S))


def break_it(play: Play) -> None:
    (play.stage.folder / "broken").touch()


def mend(play: Play) -> None:
    (play.stage.folder / "broken").unlink()


def not_there(play: Play) -> None:
    raise NothingToStrike("nothing there")


HARMLESS = Fault("h", "store", "starting", lambda _: None)
ABSENT = Fault("a", "store", "starting", not_there)


def test_a_killed_command_is_issued_again(play):
    works_long(play)
    found = commands(play, Fault("k", "engine", "working", lambda p: p.send(signal.SIGKILL), (End(-9),)))
    assert [end.partition(":")[0] for end in found.ends] == ["-9", "0"]
    assert found.problems == []
    assert found.faults[0].outcome == AGAIN


def test_what_strikes_between_two_commands_is_mended_as_the_second_one_says(play):
    works_long(play)
    ends = (End(4, "is damaged", mend),)
    found = commands(play, Fault("b", "store", "working", break_it, ends, is_between=True))
    assert [end.partition(":")[0] for end in found.ends] == ["130", "4", "0"]
    assert found.faults[0].outcome == MENDED


def test_of_two_faults_that_end_a_command_alike_each_explains_one_end(tmp_path):
    fault = Fault("k", "engine", "starting", lambda _: None, (End(-9),))
    both = [Struck(fault, 0.0, has_struck=True), Struck(fault, 0.0, has_struck=True)]
    play = Play(Stage(tmp_path), random.Random(0), ())
    assert all(campaign._explain(play, both, Ended(-9, "", 1.0)) for _ in range(2))
    assert [s.outcome for s in both] == [AGAIN, AGAIN]


def test_what_nothing_comes_of_and_what_is_not_there_to_strike(play):
    found = commands(play, HARMLESS, ABSENT)
    assert found.ends == ["0"]
    assert [s.has_struck for s in found.faults] == [True, False]
    assert "nothing there" in play.notes[0]


def test_an_end_that_no_fault_explains_is_wrong(play):
    break_it(play)
    found = commands(play, Fault("h", "store", "starting", lambda _: None, (End(5, "is damaged"),)))
    (problem,) = found.problems
    assert problem == "command 0 ended with 4, no fault does that: dflop: CURRENT is damaged"


def test_a_command_that_hangs_is_wrong(play, monkeypatch):
    monkeypatch.setattr(campaign, "LIMIT_S", 0.2)
    (problem,) = commands(play).problems
    assert problem.startswith("command 0 has not ended within 0.2 s")


DIES = Fault("d", "engine", "before", lambda _: None, DIED, dies_at="time:sleep:before:1")


def test_a_place_to_die_at_that_was_not_reached_has_not_struck(play, monkeypatch):
    works_long(play)
    monkeypatch.setattr(play, "start", lambda *, dies_at="": Play.start(play))
    kill = Fault("k", "engine", "working", lambda p: p.send(signal.SIGKILL), (End(-9),))
    found = commands(play, kill, DIES)
    assert [(s.has_struck, s.outcome) for s in found.faults] == [(True, AGAIN), (False, NOT_STRUCK)]


def test_a_death_at_its_place_explains_the_end_that_says_so(tmp_path):
    killer = Fault("k", "engine", "starting", lambda _: None, (End(-9),))
    both = [Struck(killer, 0.0, has_struck=True), Struck(DIES, 0.0, has_struck=True)]
    play = Play(Stage(tmp_path), random.Random(0), ())
    assert campaign._explain(play, both, Ended(-9, f"{LAST_WORDS}{DIES.dies_at}\n", 1.0))
    assert [s.outcome for s in both] == [NOT_STRUCK, AGAIN]


def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str], *faults: Fault) -> Result:
    monkeypatch.setattr(play_module, "DFLOP", ("-c", WORKS.replace("SECONDS", "1")))
    monkeypatch.setattr(campaign.stage, "copy_stage", lambda _dataset, folder, **_changes: Stage(folder))
    monkeypatch.setattr(campaign.checks, "problems", lambda _play, _losses: problems)
    drawn = [Struck(fault, 0.05) for fault in faults]
    return campaign.play_run(tmp_path, tmp_path, drawn, random.Random(2), 0, None)


def test_outcomes_are_those_of_the_faults_that_struck(tmp_path, monkeypatch):
    assert [s.outcome for s in played(tmp_path, monkeypatch, [], HARMLESS, ABSENT).faults] == [ITSELF, NOT_STRUCK]
    found = played(tmp_path, monkeypatch, ["a sample is lost"], HARMLESS, ABSENT)
    assert [s.outcome for s in found.faults] == [campaign.WRONG, NOT_STRUCK]
    assert found.as_dict()["faults"][0] == {"name": "h", "part": "store", "outcome": "wrong"}
