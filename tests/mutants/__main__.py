"""Do the tests still notice faults? `python -m tests.mutants [--only ID ...] [--json FILE] [--tree DIR]`.

Makes each fault of the table in a copy of the tree and runs the tests that should notice it. At the end the tests that
failed run once more without any fault: one that fails there, too, has noticed nothing. Ends with 1 unless every fault
was caught.
"""

import argparse
import dataclasses
import json
import multiprocessing
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.table import Mutant, read_table
from tests.mutants.trial import Result, Trial, check_import, red_without, try_mutant

ROOT = Path(__file__).parents[2]


def main(words: Sequence[str] | None = None) -> int:
    """Try the faults, print a line for each, and write the results."""
    given = _parse(words)
    table = read_table()
    if unknown := set(given.only) - set(table):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(table)}")
    with tempfile.TemporaryDirectory(prefix="mu") as scratch:
        trial = Trial(given.tree.absolute(), Path(scratch), given.marks, given.limit_s)
        check_import(trial)
        results: dict[str, Result] = {}
        for result in _try_all(trial, [table[name] for name in given.only or table], given.jobs):
            results[result.id] = result
            print(f"{result.id:36} {result.status:18} {result.cpu_s:7.1f} s  {result.first_failing}", flush=True)
            _write(given.json, trial, results)
        _check_without(trial, results)
        _write(given.json, trial, results)
    caught = [r for r in results.values() if r.status == "caught"]
    print(f"{len(caught)} of {len(results)} caught, {sum(r.cpu_s for r in results.values()):.0f} s of processor time")
    return 0 if len(caught) == len(results) else 1


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these faults")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    parser.add_argument("--json", type=Path, help="file for the results, written after every fault")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose tests are tried")
    parser.add_argument("--marks", default="", help="expression for pytest's -m; by default its own choice")
    parser.add_argument("--limit-s", type=float, default=480.0, help="processor time of one fault")
    return parser.parse_args(words)


def _try_all(trial: Trial, mutants: Sequence[Mutant], num_jobs: int) -> Iterator[Result]:
    """Results as they come, each process with a copy of its own."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(try_mutant, trial, mutant) for mutant in mutants]):
            yield future.result()


def _check_without(trial: Trial, results: dict[str, Result]) -> None:
    """A test that fails without a fault has not caught one."""
    tests = sorted({r.first_failing for r in results.values() if r.status == "caught"})
    # pytest's own words, where it named no test, are no name of one.
    red = red_without(trial, [test for test in tests if " ended with " not in test]) if tests else set()
    for result in results.values():
        if result.first_failing in red:
            result.status = "red without it"
            print(f"{result.id}: {result.first_failing} fails without the fault, too", flush=True)


def _write(file: Path | None, trial: Trial, results: dict[str, Result]) -> None:
    if file is None:
        return
    head = ["git", "-C", str(trial.tree), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    rows = [dataclasses.asdict(result) for result in results.values()]
    file.write_text(json.dumps({"commit": commit, "marks": trial.marks, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
