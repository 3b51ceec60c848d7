"""Fault campaign: whole runs of the demo in small, one to three random faults in each.

Runs are played until there are `--runs` or `--minutes` are over; the table goes to stdout, what happens to stderr.
`--run N --seed S` plays run N of that campaign again, and keeps its folder, as that of every run that did not end as it
should. Then the campaign ends with 1.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from dflop.jobs.rundir import RunDir
from dflop.launch.kernels import kernel_environment
from tests.bench.figures import json_text, machine, revision
from tests.chaos import campaign, checks, page, slurm_faults, stage


def say(*lines: str) -> None:
    print(*lines, sep="\n    ", file=sys.stderr, flush=True)


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
        content = play(args, Path(tempfile.mkdtemp(prefix="dflop-chaos-")))
    print(*page.tables(content).values(), sep="\n\n")
    wrong = [run["number"] for run in content["runs"] if run["problems"]]
    say(f"runs that did not end as they should: {wrong}")
    return 1 if wrong else 0


def play(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play the campaign; what the file of results has."""
    faults, changes = (slurm_faults.FAULTS, slurm_faults.CHANGES) if args.slurm else (campaign.FAULTS, {})
    faults = tuple(fault for fault in faults if args.fault in fault.name)
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
    code, environment = "from dflop.schedule.warm import warm; warm()", os.environ | kernel_environment(os.environ)
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=stage.REPO, check=True)
    unharmed = campaign.play_run(folder / "undisturbed", dataset, [], random.Random(0), None, changes)
    if unharmed["problems"]:
        raise RuntimeError(f"a run that nothing happened to: {unharmed}")
    losses = checks.losses_of(RunDir(next((folder / "undisturbed" / "runs").iterdir())))
    began_s = time.monotonic()
    for number in [args.run] if args.run is not None else range(args.runs):
        if time.monotonic() - began_s > 60 * args.minutes:
            say(f"the time is over after {number} runs")
            break
        drawn, rng = campaign.draw(args.seed, number, faults)
        if args.slurm:
            slurm_faults.cluster_is("mend")
        where = folder / f"run-{number}"
        result = campaign.play_run(where, dataset, drawn, rng, losses, changes)
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


if __name__ == "__main__":
    raise SystemExit(main())
