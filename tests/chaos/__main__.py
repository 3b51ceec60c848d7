"""Fault campaign: `python -m tests.chaos [--runs N] [--minutes M] [--seed S] [--run N] [--slurm] [--json FILE]`.

Whole runs of the demo in small, one to three random faults in each, until so many runs are played or the time is over;
the table goes to stdout, what happens to stderr. `--run N --seed S` plays run N of that campaign again, and keeps its
folder, as that of every run that did not end as it should. Then the campaign ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.figures import json_text, machine, revision
from tests.chaos import campaign, page, slurm_faults, stage


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Fault campaign.")
    parser.add_argument("--runs", type=int, default=50, help="runs at most")
    parser.add_argument("--minutes", type=float, default=120, help="no run begins after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, help="play this run only, and keep its folder")
    parser.add_argument("--fault", help="draw only faults with this text in their name")
    parser.add_argument("--slurm", action="store_true", help="on the tests' Slurm of four nodes, with its faults")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    # As Ctrl-C does: what was started is ended, whatever ends the campaign.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with slurm_faults.cluster() if args.slurm else contextlib.nullcontext():
        content = play(args, Path(tempfile.mkdtemp(prefix="dflop-chaos-")))
    print(*page.tables(content).values(), sep="\n\n")
    wrong = [run["number"] for run in content["runs"] if run["problems"]]
    if wrong:
        say(f"{len(wrong)} of {len(content['runs'])} runs did not end as they should: {wrong}")
    return 1 if wrong else 0


def play(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play the campaign; what the file of results has."""
    faults = slurm_faults.FAULTS if args.slurm else campaign.FAULTS
    faults = tuple(fault for fault in faults if (args.fault or "") in fault.name)
    changes = slurm_faults.CHANGES if args.slurm else {}
    more = f"{f' --fault {args.fault!r}' if args.fault else ''}{' --slurm' if args.slurm else ''}"
    content: dict[str, Any] = {
        "machine": machine("duckdb", "torch", "prefect", "submitit"),
        "command": f"python -m tests.chaos --runs {args.runs} --seed {args.seed}{more}",
        "backend": "slurm" if args.slurm else "local", "seed": args.seed, "fault": args.fault, "runs": [],
    }  # fmt: skip
    dataset = folder / "dataset"
    say("making the dataset, compiling kernels")  # ranks would be given up while their scheduler compiles
    stage.make_dataset(dataset)
    stage.compile_kernels()
    say("a run that nothing happens to")
    losses, began_s = campaign.undisturbed(folder / "undisturbed", dataset, changes), time.monotonic()
    for number in [args.run] if args.run is not None else range(args.runs):
        if time.monotonic() - began_s > 60 * args.minutes:
            say(f"the time is over after {number} runs")
            break
        drawn, rng = campaign.draw(args.seed, number, faults)
        say(f"run {number}: {'; '.join(struck.fault.name for struck in drawn)}")
        if args.slurm:
            slurm_faults.cluster_is("mend")
        where = folder / f"run-{number}"
        result = campaign.play_run(where, dataset, drawn, rng, number, losses, changes)
        tell(result)
        content["runs"].append({**result.as_dict(), "revision": revision()})
        if args.json:
            args.json.write_text(json_text(content))
        if args.run is not None or result.problems:
            say(f"    its folder: {where}")
        else:
            shutil.rmtree(where, ignore_errors=True)
    return content


def tell(result: campaign.Result) -> None:
    faults = [f"{struck.fault.name}: {struck.outcome}" for struck in result.faults]
    ends, wrong = [f"ended with {end}" for end in result.ends], [f"WRONG: {problem}" for problem in result.problems]
    for line in (*faults, *ends, *result.notes, *wrong, f"{result.seconds:.0f} s"):
        say(f"    {line}")


if __name__ == "__main__":
    raise SystemExit(main())
