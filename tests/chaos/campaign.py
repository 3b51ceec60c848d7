"""Draws the faults of a run from its seed, plays it to its end as an operator would, and judges how it ended."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflop.jobs.rundir import RunDir
from tests.chaos import checks, stage, strikes
from tests.chaos.dying import LAST_WORDS
from tests.chaos.fault import MOMENTS, Fault, NothingToStrike
from tests.chaos.faults import FAULTS
from tests.chaos.play import Ended, Play

MAX_COMMANDS = 8
_NUM_FAULTS = (2, 2, 3, 1)
"""Of runs, in turn; the one that has three takes that of the next one along."""
LIMIT_S = 240.0
"""Of one command; longer is hung."""
OUTCOMES = ITSELF, AGAIN, MENDED, NOT_STRUCK, WRONG = (
    "goes on by itself", "same command goes on", "refused, mended, goes on", "not struck", "wrong",
)  # fmt: skip


@dataclass
class Struck:
    """A fault of a run, and what came of it."""

    fault: Fault
    roll: float
    outcome: str = NOT_STRUCK
    has_struck: bool = False


@dataclass
class Result:
    """What a run came to."""

    number: int
    command: str
    faults: list[Struck]
    ends: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        faults = [{"name": s.fault.name, "part": s.fault.part, "outcome": s.outcome} for s in self.faults]
        return {**vars(self), "faults": faults}


def draw(seed: int, number: int, faults: Sequence[Fault] = FAULTS) -> tuple[list[Struck], random.Random]:
    """Faults of a run of a campaign, in turn so that all are met, and what draws all else in it."""
    in_turn = list(faults)
    random.Random(f"{seed} {number // len(faults)}").shuffle(in_turn)
    rng, at = random.Random(f"{seed}/{number}"), number % len(faults)
    chosen, wanted = [in_turn[at]], _NUM_FAULTS[number % len(_NUM_FAULTS)]
    # From the middle on: half as many runs as there are faults meet nearly all of them.
    half = (at + len(faults) // 2) % len(faults)
    for fault in in_turn[half:] + in_turn[:half]:
        if len(chosen) < wanted and all(_go_together(fault, other) for other in chosen):
            chosen.append(fault)
    return [Struck(fault, rng.random()) for fault in chosen], rng


def _go_together(a: Fault, b: Fault) -> bool:
    """One of a kind, and one that the operator has to repair."""
    if a is b or (a.excludes and a.excludes == b.excludes):
        return False
    return not all(any(end.repair for end in fault.ends) for fault in (a, b))


def play_run(
    folder: Path, dataset: Path, drawn: list[Struck], rng: random.Random, number: int,
    losses: Mapping[int, float] | None, changes: Mapping[str, Mapping[str, Any]],
) -> Result:  # fmt: skip
    """Play a run of a stage's dataset to its end and check it; `losses` by step are those of an undisturbed one."""
    uses_prefect = bool(drawn) and not any(s.fault.dies_at for s in drawn) and rng.random() < 1 / 6
    command = ("run" if uses_prefect else "train", "chaos.yaml")
    play = Play(stage.copy_stage(dataset, folder, changes), rng, command)
    result, began_s = Result(number, command[0], drawn, notes=play.notes), time.monotonic()
    try:
        for struck in drawn:
            if struck.fault.prepare is not None:
                struck.fault.prepare(play)
        is_over = commands(play, result)
        play.end_others()
        if uses_prefect:  # docs/operating.md: what a killed driver leaves of its temporary server, this ends
            play.dflop("reap")
        if is_over:
            result.problems += checks.problems(play, losses)
    finally:
        play.end_all()
        strikes.unmount_disks(play)
    for struck in drawn:
        if struck.has_struck and result.problems:
            struck.outcome = WRONG
        elif struck.has_struck and struck.outcome == NOT_STRUCK:
            struck.outcome = ITSELF
    result.seconds = time.monotonic() - began_s
    return result


def commands(play: Play, result: Result) -> bool:
    """Issue the command until the run is over; whether it is."""
    waiting = [s for s in result.faults if s.fault.when != "before"]
    for struck in result.faults:
        if struck not in waiting:
            _strike(play, struck)
    dies_at = "".join(s.fault.dies_at for s in result.faults)
    for number in range(MAX_COMMANDS):
        play.start(dies_at=dies_at if number == 0 else "")
        ended, between = _one_command(play, waiting)
        play.tend(at_once=True)
        if ended is None:
            result.problems.append(f"command {number} hangs after {LIMIT_S:g} s: {_last(play.log.read_text())}")
            return False
        if number == 0:
            for struck in result.faults:  # the place to die at may not have been reached
                struck.has_struck &= f"{LAST_WORDS}{struck.fault.dies_at}" in ended.said or not struck.fault.dies_at
        result.ends.append(f"{ended.code}: {_last(ended.said)}" if ended.code else "0")
        if between is not None and ended.code in (130, 143, -2):
            _strike(play, between)
        elif ended.code == 0:
            return True
        elif not explain(play, result.faults, ended):
            result.problems.append(f"command {number} ended with {ended.code}, no fault does that: {_last(ended.said)}")
            return False
    result.problems.append(f"{MAX_COMMANDS} commands were not enough")
    return False


def _one_command(play: Play, waiting: list[Struck]) -> tuple[Ended | None, Struck | None]:
    """Wait for the end of a command and strike meanwhile; (how it ended, the fault that it was interrupted for)."""
    between: Struck | None = None
    while (ended := play.look()) is None:
        if play.age_s() > LIMIT_S:
            return None, None
        play.tend()
        for struck in list(waiting):
            if between is None and MOMENTS[struck.fault.when](play, struck.roll):
                waiting.remove(struck)
                if struck.fault.when == "between":
                    between = struck
                    play.send(signal.SIGINT)
                else:
                    _strike(play, struck)
        time.sleep(0.03)
    return ended, between


def _strike(play: Play, struck: Struck) -> None:
    try:
        struck.fault.strike(play)
        struck.has_struck = True
    except (NothingToStrike, OSError, subprocess.SubprocessError) as error:
        play.notes.append(f"{struck.fault.name}: not struck: {error}")


def explain(play: Play, faults: Sequence[Struck], ended: Ended) -> bool:
    """Whether a fault that has struck may end the command so; what it says to do is done."""
    # First what said itself that it died. One that has explained an end already comes last: of two drivers killed,
    # each explains one.
    struck_ones = [s for s in faults if s.has_struck]
    for struck in sorted(struck_ones, key=lambda s: (not s.fault.dies_at, s.outcome != NOT_STRUCK)):
        for end in struck.fault.ends:
            if end.code == ended.code and end.says in ended.said:
                if end.repair is not None:
                    with contextlib.suppress(NothingToStrike):
                        end.repair(play)
                struck.outcome = MENDED if end.repair is not None or struck.outcome == MENDED else AGAIN
                return True
    return False


def _last(said: str) -> str:
    """The last thing that a command said to the operator, on one line."""
    lines = said.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("dflop: ")]
    return " | ".join(line.strip() for line in (lines[starts[-1] :] if starts else lines[-2:]))[:400]


def undisturbed(folder: Path, dataset: Path, changes: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    """Losses by step of a run that nothing happens to; what is checked of others holds of it, or `RuntimeError`."""
    shutil.rmtree(folder, ignore_errors=True)
    result = play_run(folder, dataset, [], random.Random(0), -1, None, changes)
    if result.problems:
        raise RuntimeError("a run that nothing happened to: " + "; ".join([*result.problems, *result.ends]))
    run = RunDir(next((folder / "runs").iterdir()))
    return {step: found[0] for step, found in checks.losses_of(run).items()}
