"""Fault campaign: `python -m tests.chaos [--runs N] [--minutes M] [--seed S] [--run N] [--slurm] [--json FILE]`.

Whole runs of the demo in small, one to three random faults in each, until so many runs are played or the time is over;
the table goes to stdout, what happens to stderr. `--run N --seed S` plays run N of that campaign again, and keeps its
folder. A file of results has every run when it is over; a campaign that was ended goes on where its file does. Ends
with 1 where something that has to hold did not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.figures import json_text, machine, revision
from tests.chaos import campaign, page, stage
from tests.chaos.fault import Fault

LIBRARIES = ("duckdb", "torch", "prefect", "submitit")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    """Play the campaign; returns the exit code."""
    args = _arguments(words)
    # As Ctrl-C does: what was started is ended, whatever ends the campaign.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    faults = _faults(args)
    if args.list:
        for fault in faults:
            print(f"{fault.part:8s} {fault.when:15s} {fault.name}")
        return 0
    folder = Path(args.keep or tempfile.mkdtemp(prefix="dflop-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _slurm(args):
            results = _play(args, faults, folder)
    finally:
        if not args.keep and args.run is None:
            shutil.rmtree(folder, ignore_errors=True)
    content = _content(args, results)
    print(*page.tables(content).values(), sep="\n\n")
    wrong = [r["number"] for r in results if r["problems"]]
    if wrong:
        say(f"{len(wrong)} of {len(results)} runs did not end as they should: {wrong}")
    return 1 if wrong else 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Fault campaign.")
    parser.add_argument("--runs", type=int, default=50, help="runs at most")
    parser.add_argument("--minutes", type=float, default=120, help="no run begins after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, help="play this run only, and keep its folder")
    parser.add_argument("--fault", help="draw only faults with this text in their name")
    parser.add_argument("--slurm", action="store_true", help="on the tests' Slurm of four nodes, with its faults")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--keep", help="folder to work in, which stays")
    parser.add_argument("--json", type=Path, help="file for the results; runs that it has are not played again")
    return parser.parse_args(words)


def _content(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the file of results has."""
    more = f"{f' --fault {args.fault!r}' if args.fault else ''}{' --slurm' if args.slurm else ''}"
    command = f"python -m tests.chaos --runs {args.runs} --seed {args.seed}{more}"
    return {"machine": machine(*LIBRARIES), "command": command, **_campaign(args), "runs": results}


def _campaign(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the faults of a run of this number."""
    return {"backend": "slurm" if args.slurm else "local", "seed": args.seed, "fault": args.fault}


def _played(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of the runs that the file has."""
    if not args.json or args.run is not None or not args.json.is_file():
        return []
    content = json.loads(args.json.read_text())
    theirs = {name: content.get(name) for name in _campaign(args)}
    if theirs != _campaign(args):
        raise SystemExit(f"{args.json} has another campaign, {theirs}, not {_campaign(args)}; name another file")
    runs: list[dict[str, Any]] = content["runs"]
    return runs


def _slurm(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """The tests' cluster where it is wanted."""
    if not args.slurm:
        return contextlib.nullcontext()
    from tests.chaos import slurm_faults

    return slurm_faults.cluster()


def _mend(args: argparse.Namespace) -> None:
    if args.slurm:
        from tests.chaos import slurm_faults

        slurm_faults.mend()


def _changes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    if not args.slurm:
        return {}
    from tests.chaos import slurm_faults

    return slurm_faults.CHANGES


def _faults(args: argparse.Namespace) -> tuple[Fault, ...]:
    faults = campaign.FAULTS
    if args.slurm:
        from tests.chaos import slurm_faults

        faults = slurm_faults.FAULTS
    if args.fault:
        faults = tuple(f for f in faults if args.fault in f.name)
        if not faults:
            raise SystemExit(f"no fault has `{args.fault}` in its name; --list shows them")
    return faults


def _play(args: argparse.Namespace, faults: tuple[Fault, ...], folder: Path) -> list[dict[str, Any]]:
    dataset = folder / "dataset"
    if not (dataset / "data" / "annotations.jsonl").is_file():
        say("making the dataset")
        stage.make_dataset(dataset)
        say("compiling kernels")  # ranks of a short `stall_s` would be given up while their scheduler compiles
        stage.compile_kernels()
    say("a run that nothing happens to")
    losses = _losses(folder, dataset, _changes(args))
    began_s, results = time.monotonic(), _played(args)
    played = {result["number"] for result in results}
    for number in [args.run] if args.run is not None else range(args.runs):
        if number in played:
            continue
        if args.run is None and time.monotonic() - began_s > 60 * args.minutes:
            say(f"the time is over after {len(results)} runs")
            break
        drawn, rng = campaign.draw(args.seed, number, faults)
        say(f"run {number}: {'; '.join(s.fault.name for s in drawn)}")
        _mend(args)
        where = folder / f"run-{number}"
        shutil.rmtree(where, ignore_errors=True)
        result = campaign.play_run(where, dataset, drawn, rng, number, losses, changes=_changes(args))
        say("\n".join(f"    {line}" for line in _told(result)))
        results.append({**result.as_dict(), "revision": revision()})
        if args.json:
            args.json.write_text(json_text(_content(args, results)))
        if not args.keep and args.run is None and not result.problems:
            shutil.rmtree(where, ignore_errors=True)
    if args.run is not None:
        say(f"its folder: {folder / f'run-{args.run}'}")
    return results


def _losses(folder: Path, dataset: Path, changes: dict[str, dict[str, Any]]) -> dict[int, float]:
    """Once per folder."""
    file = folder / "losses.json"
    if not file.is_file():
        file.write_text(json.dumps(campaign.undisturbed(folder / "undisturbed", dataset, changes)))
    return {int(step): loss for step, loss in json.loads(file.read_text()).items()}


def _told(result: campaign.Result) -> list[str]:
    faults = [f"{struck.fault.name}: {struck.outcome}" for struck in result.faults]
    wrong = [f"WRONG: {problem}" for problem in result.problems]
    return [*faults, *(f"ended with {end}" for end in result.ends), *result.notes, *wrong, f"{result.seconds:.0f} s"]


if __name__ == "__main__":
    raise SystemExit(main())
