"""Fault campaign: whole runs of the demo in small, one to three random faults in each.

Runs are played until there are `--runs` or `--minutes` are over; the table goes to stdout, what happens to stderr.
`--run N --seed S` plays run N of that campaign again, and keeps its folder, as that of every run that did not end as it
should. Then the campaign ends with 1.
"""

import argparse
import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.launch.kernels import kernel_environment
from tests.bench.figures import json_text, machine, revision
from tests.chaos import checks, faults, page, slurm_faults, stage, strikes
from tests.chaos.faults import MOMENTS, Fault
from tests.chaos.page import AGAIN, ITSELF, MENDED, NOT_STRUCK, WRONG
from tests.chaos.play import Ended, NothingToStrike, Play

MAX_COMMANDS = 8
LIMIT_S = 240.0
"""Of one command; longer is hung."""


@dataclass
class Struck:
    """A fault of a run, and what came of it."""

    fault: Fault
    roll: float
    outcome: str = NOT_STRUCK


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="runs at most")
    parser.add_argument("--minutes", type=float, default=120, help="no run begins after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, help="play this run only, and keep its folder")
    parser.add_argument("--fault", default="", help="draw only faults with this text in their name")
    parser.add_argument("--slurm", action="store_true", help="on the tests' Slurm of four nodes, with its faults")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    # As Ctrl-C does: what was started is ended, whatever ends the campaign.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with slurm_faults.cluster() if args.slurm else contextlib.nullcontext():
        content = campaign(args, Path(tempfile.mkdtemp(prefix="dflop-chaos-")))
    print(*page.tables(content).values(), sep="\n\n")
    wrong = [run["number"] for run in content["runs"] if run["problems"]]
    say(f"runs that did not end as they should: {wrong}")
    return 1 if wrong else 0


def say(*lines: str) -> None:
    print(*lines, sep="\n    ", file=sys.stderr, flush=True)


def campaign(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play the runs; what the file of results has."""
    all_faults, changes = (slurm_faults.FAULTS, slurm_faults.CHANGES) if args.slurm else (faults.FAULTS, {})
    chosen = [fault for fault in all_faults if args.fault in fault.name]
    content: dict[str, Any] = {
        "machine": machine("duckdb", "torch", "prefect", "submitit"),
        "command": f"python -m tests.chaos {shlex.join(sys.argv[1:])}",
        "backend": "slurm" if args.slurm else "local",
        "runs": [],
    }
    dataset = folder / "dataset"
    say("a run that nothing happens to")
    stage.make_dataset(dataset)
    # Ranks would be given up while their scheduler compiles.
    code = "from dflop.schedule.step_scheduler import warm; warm()"
    environment = os.environ | kernel_environment(os.environ)
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=stage.REPO, check=True)
    unharmed = play_run(folder / "undisturbed", dataset, [], random.Random(0), None, changes)
    if unharmed["problems"]:
        raise RuntimeError(f"a run that nothing happened to: {unharmed}")
    losses = checks.losses_of(next((folder / "undisturbed" / "runs").glob("[!.]*")))
    ends_s = time.monotonic() + 60 * args.minutes
    for number in [args.run] if args.run is not None else range(args.runs):
        if time.monotonic() > ends_s:
            say(f"the time is over after {number} runs")
            break
        if args.slurm:
            slurm_faults.cluster_is("mend")
        where, (drawn, rng) = folder / f"run-{number}", draw(args.seed, number, chosen)
        result = play_run(where, dataset, drawn, rng, losses, changes)
        content["runs"].append({"number": number, **result, "revision": revision()})
        if args.json:
            args.json.write_text(json_text(content))
        say(
            f"run {number} in {where}: {result['seconds']:.0f} s",
            *(f"{struck.fault.name}: {struck.outcome}" for struck in drawn),
            *(f"ended with {end}" for end in result["ends"]),
            *result["notes"],
            *(f"WRONG: {problem}" for problem in result["problems"]),
        )
        if args.run is None and not result["problems"]:
            shutil.rmtree(where, ignore_errors=True)
    return content


def draw(seed: int, number: int, among: Sequence[Fault]) -> tuple[list[Struck], random.Random]:
    """Faults of a run, dealt in turn so that all are met, and what draws all else in it."""
    num_faults, first = (3, 2 * number) if number % 2 == 0 else (1, 2 * number + 1)
    deal, at = divmod(first, len(among))
    deck, rng = random.Random(f"{seed} {deal}").sample(among, len(among)), random.Random(f"{seed}/{number}")
    chosen: list[Fault] = []
    for fault in deck[at:] + deck[:at]:
        if len(chosen) < num_faults and all(_go_together(fault, other) for other in chosen):
            chosen.append(fault)
    return [Struck(fault, rng.random()) for fault in chosen], rng


def _go_together(a: Fault, b: Fault) -> bool:
    """Not two of a kind, nor two that the operator has to repair."""
    is_repaired = [any(end.repair for end in fault.ends) for fault in (a, b)]
    return not all(is_repaired) and not (a.excludes and a.excludes == b.excludes)


def play_run(
    folder: Path, dataset: Path, drawn: list[Struck], rng: random.Random,
    losses: Mapping[int, float] | None, changes: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Play a run to its end as an operator would and check it; `losses` by step are those of an undisturbed one."""
    dies_at = "".join(struck.fault.dies_at for struck in drawn)
    uses_prefect = bool(drawn) and not dies_at and rng.random() < 1 / 6
    stage.copy_stage(dataset, folder, changes)
    play = Play(folder, rng, ("run" if uses_prefect else "train", "run.yaml"))
    began_s = time.monotonic()
    try:
        for struck in drawn:
            if struck.fault.prepare is not None:
                struck.fault.prepare(play)
        problem = _commands(play, drawn, dies_at)
        play.end_others()
        if uses_prefect:  # docs/operating.md: what a killed driver leaves of its temporary server, this ends
            play.dflop("reap")
        problems = [problem] if problem else checks.problems(play, losses)
    finally:
        play.end_all()
        strikes.unmount_disks(play)
    for struck in drawn:
        if struck.outcome != NOT_STRUCK and problems:
            struck.outcome = WRONG
    return {
        "command": play.command[0],
        "faults": [{"name": s.fault.name, "part": s.fault.part, "outcome": s.outcome} for s in drawn],
        "ends": [f"{ended.code}: {_last(ended.said)}" if ended.code else "0" for ended in play.ended],
        "problems": problems,
        "notes": play.notes,
        "seconds": time.monotonic() - began_s,
    }


def _commands(play: Play, drawn: list[Struck], dies_at: str) -> str:
    """Issue the command until the run is over; why it never will be."""
    waiting = [struck for struck in drawn if not struck.fault.dies_at]
    for struck in [s for s in waiting if s.fault.when == "before"]:
        waiting.remove(struck)
        _strike(play, struck)
    for number in range(MAX_COMMANDS):
        play.start(dies_at=dies_at if number == 0 else "")
        between: Struck | None = None  # the fault that it was interrupted for
        while (ended := play.look()) is None:
            if play.age_s() > LIMIT_S:
                return f"command {number} hangs after {LIMIT_S:g} s: {_last(play.log.read_text())}"
            for struck in list(waiting):
                if between is None and MOMENTS[struck.fault.when](play, struck.roll):
                    waiting.remove(struck)
                    if struck.fault.when == "between":
                        between = struck
                        play.send(signal.SIGINT)
                    else:
                        _strike(play, struck)
            time.sleep(0.03)
        play.settle()
        if between is not None and ended.code in (130, 143, -2):
            _strike(play, between)
        elif ended.code == 0:
            return ""
        elif not _explain(play, drawn, ended):
            return f"command {number} ended with {ended.code}, no fault does that: {_last(ended.said)}"
    return f"{MAX_COMMANDS} commands were not enough"


def _strike(play: Play, struck: Struck) -> None:
    try:
        struck.fault.strike(play)
        struck.outcome = ITSELF
    except (NothingToStrike, OSError, subprocess.SubprocessError) as error:
        play.notes.append(f"{struck.fault.name}: not struck: {error}")


def _explain(play: Play, drawn: list[Struck], ended: Ended) -> bool:
    """Whether a fault that has struck may end the command so; what it says to do is done."""
    # First what said itself that it died. One that has explained an end already comes last: of two drivers killed,
    # each explains one.
    for struck in sorted(drawn, key=lambda s: (not s.fault.dies_at, s.outcome != ITSELF)):
        for end in struck.fault.ends if struck.fault.dies_at or struck.outcome != NOT_STRUCK else ():
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


if __name__ == "__main__":
    raise SystemExit(main())
