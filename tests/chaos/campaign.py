"""Draws the faults of a run from its seed, plays it to its end as an operator would, and judges how it ended."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import checks, stage, strikes
from tests.chaos.dying import LAST_WORDS
from tests.chaos.faults import FAULTS, MOMENTS, Fault
from tests.chaos.play import Ended, NothingToStrike, Play

MAX_COMMANDS = 8
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


def draw(seed: int, number: int, faults: Sequence[Fault] = FAULTS) -> tuple[list[Struck], random.Random]:
    """Faults of a run of a campaign, dealt in turn so that all are met, and what draws all else in it."""
    num_faults, dealt = ((2, 0), (2, 2), (3, 4), (1, 7))[number % 4]
    dealt += number // 4 * 8
    deck, at, chosen = list(faults), dealt % len(faults), list[Fault]()
    random.Random(f"{seed} {dealt // len(faults)}").shuffle(deck)
    for fault in deck[at:] + deck[:at]:
        if len(chosen) < num_faults and all(_go_together(fault, other) for other in chosen):
            chosen.append(fault)
    rng = random.Random(f"{seed}/{number}")
    return [Struck(fault, rng.random()) for fault in chosen], rng


def _go_together(a: Fault, b: Fault) -> bool:
    """Not two of a kind, nor two that the operator has to repair."""
    is_repaired = [any(end.repair for end in fault.ends) for fault in (a, b)]
    return not all(is_repaired) and not (a.excludes and a.excludes == b.excludes)


def play_run(
    folder: Path, dataset: Path, drawn: list[Struck], rng: random.Random,
    losses: Mapping[int, float] | None, changes: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Play a run of a stage's dataset to its end and check it; `losses` by step are those of an undisturbed one."""
    uses_prefect = bool(drawn) and not any(s.fault.dies_at for s in drawn) and rng.random() < 1 / 6
    command = ("run" if uses_prefect else "train", "chaos.yaml")
    stage.copy_stage(dataset, folder, changes)
    play, began_s = Play(folder, rng, command), time.monotonic()
    try:
        for struck in drawn:
            if struck.fault.prepare is not None:
                struck.fault.prepare(play)
        problems = list(commands(play, drawn))
        play.end_others()
        if uses_prefect:  # docs/operating.md: what a killed driver leaves of its temporary server, this ends
            play.dflop("reap")
        problems += [] if problems else checks.problems(play, losses)
    finally:
        play.end_all()
        strikes.unmount_disks(play)
    for struck in drawn:
        if struck.outcome != NOT_STRUCK and problems:
            struck.outcome = WRONG
    faults = [{"name": s.fault.name, "part": s.fault.part, "outcome": s.outcome} for s in drawn]
    ends = [f"{ended.code}: {_last(ended.said)}" if ended.code else "0" for ended in play.ended]
    return {"command": command[0], "faults": faults, "ends": ends, "problems": problems, "notes": play.notes,
            "seconds": time.monotonic() - began_s}  # fmt: skip


def commands(play: Play, faults: Sequence[Struck]) -> Iterator[str]:
    """Issue the command until the run is over; why it never will be."""
    waiting = [struck for struck in faults if struck.fault.when != "before"]
    for struck in faults:
        if struck not in waiting:
            _strike(play, struck)
    dies_at = "".join(struck.fault.dies_at for struck in faults)
    for number in range(MAX_COMMANDS):
        play.start(dies_at=dies_at if number == 0 else "")
        ended, between = _one_command(play, waiting)
        play.settle()
        if ended is None:
            yield f"command {number} hangs after {LIMIT_S:g} s: {_last(play.log.read_text())}"
            return
        for struck in faults:  # the place to die at may not have been reached
            if number == 0 and struck.fault.dies_at and f"{LAST_WORDS}{struck.fault.dies_at}" not in ended.said:
                struck.outcome = NOT_STRUCK
        if between is not None and ended.code in (130, 143, -2):
            _strike(play, between)
        elif ended.code == 0:
            return
        elif not explain(play, faults, ended):
            yield f"command {number} ended with {ended.code}, no fault does that: {_last(ended.said)}"
            return
    yield f"{MAX_COMMANDS} commands were not enough"


def _one_command(play: Play, waiting: list[Struck]) -> tuple[Ended | None, Struck | None]:
    """Wait for the end of a command and strike meanwhile; (how it ended, the fault that it was interrupted for)."""
    between: Struck | None = None
    while (ended := play.look()) is None and play.age_s() <= LIMIT_S:
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
        struck.outcome = ITSELF
    except (NothingToStrike, OSError, subprocess.SubprocessError) as error:
        play.notes.append(f"{struck.fault.name}: not struck: {error}")


def explain(play: Play, faults: Sequence[Struck], ended: Ended) -> bool:
    """Whether a fault that has struck may end the command so; what it says to do is done."""
    # First what said itself that it died. One that has explained an end already comes last: of two drivers killed,
    # each explains one.
    struck_ones = [s for s in faults if s.outcome != NOT_STRUCK]
    for struck in sorted(struck_ones, key=lambda s: (not s.fault.dies_at, s.outcome != ITSELF)):
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
