"""Fuzzing of what comes from outside, for a bounded time: `python -m tests.fuzz --minutes 10`.

Every target has a process of its own and an equal share of the time, and goes on where another one dies. A crash is
kept in `--corpus` with its example, its trace and the command that shows it again; the exit code is 1 where there is
one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import figures
from tests.fuzz import page
from tests.fuzz.engine import Crash, Found, fuzz, run_once
from tests.fuzz.target import read_back
from tests.fuzz.targets import TARGETS

MEMORY_BYTES = 12 << 30
"""Address space of a target's process: what draws more than that is a crash, too."""
_GRACE_S = 180.0
"""Beyond its share: to begin, to make crashes small, to be ended by its own alarm."""


def main() -> None:
    given = _arguments()
    if given.replay is not None:
        raise SystemExit(_replay(given.replay))
    if given.child:
        _child(given)
        return
    names = given.target or list(TARGETS)
    corpus = given.corpus
    corpus.mkdir(parents=True, exist_ok=True)
    share_s = given.minutes * 60 / len(names)
    results = []
    for number, name in enumerate(names, 1):
        found = _in_process(name, share_s, given.seed, corpus)
        results.append(found)
        _say(
            f"{number}/{len(names)} {name}: {found['num_examples']} examples in {found['elapsed_s']:.0f} s, "
            f"{len(found['crashes'])} crashes"
        )
    content = {
        "machine": figures.machine("hypothesis"),
        "command": f"python -m tests.fuzz --minutes {given.minutes:g} --seed {given.seed}",
        "minutes": given.minutes,
        "seed": given.seed,
        "targets": results,
    }
    print("\n\n".join(page.tables(content).values()))
    if given.json is not None:
        given.json.write_text(figures.json_text(content), encoding="utf-8")
    num_crashes = sum(len(found["crashes"]) for found in results)
    if num_crashes:
        _say(f"{num_crashes} crashes, see {corpus}")
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one; repeatable")
    parser.add_argument("--seed", type=int, default=1, help="of the first round of every target")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), help="folder for what crashes are shown with")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--replay", type=Path, help="run the example of a file of the corpus")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_process(name: str, seconds: float, seed: int, corpus: Path) -> dict[str, Any]:
    """What came of a target, as JSON has it; the death of its process is a crash, too."""
    with tempfile.TemporaryDirectory(prefix="dflop-fuzz-") as folder:
        out, last = Path(folder) / "found.json", Path(folder) / "last"
        command = [sys.executable, "-m", "tests.fuzz", "--child", name, "--seconds", str(seconds), "--seed", str(seed)]
        started = time.monotonic()
        with (Path(folder) / "stderr").open("w+b") as stderr:
            process = subprocess.Popen(
                [*command, "--corpus", folder],
                env=os.environ | {"TMPDIR": folder},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )  # what a killed target leaves goes with the folder
            try:
                code = process.wait(seconds + _GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            stderr.seek(0)
            words = stderr.read().decode(errors="replace")
        if out.is_file():
            found = json.loads(out.read_text(encoding="utf-8"))
        else:
            example = last.read_text(encoding="utf-8", errors="surrogatepass") if last.is_file() else "None"
            crash = Crash(f"the process ended with {code}", example, words[-20_000:], seed)
            found = asdict(Found(name, 0, time.monotonic() - started, {crash.name: crash}))
        found["what"] = TARGETS[name].what
        found["crashes"] = [_keep(Crash(**crash), name, corpus) for crash in found["crashes"].values()]
        return found


def _child(given: argparse.Namespace) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = given.corpus / "work"
    folder.mkdir()
    here = Path.cwd()
    os.chdir(folder)
    # What code under test prints is not ours to say.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    target = TARGETS[given.child]
    found = fuzz(target, folder, seconds=given.seconds, first_seed=given.seed, last=given.corpus / "last", say=_say)
    os.chdir(here)
    (given.corpus / "found.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


def _keep(crash: Crash, name: str, corpus: Path) -> dict[str, Any]:
    """Write a crash down and say what of it belongs into the results."""
    file = corpus / f"{name}-{crash.file_name}.json"
    command = f"python -m tests.fuzz --replay {file}"
    content = {"target": name, **asdict(crash), "command": command}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _say(f"{name}: {crash.name}\n  {command}")
    return {"name": crash.name, "seed": crash.seed, "file": str(file)}


def _replay(file: Path) -> int:
    content = json.loads(file.read_text(encoding="utf-8"))
    target = TARGETS[content["target"]]
    with tempfile.TemporaryDirectory(prefix="dflop-fuzz-") as folder:
        os.chdir(folder)
        crash = run_once(target, target.prepare(Path(folder)), read_back(content["example"]))
    _say(crash[1] if crash else "no crash")
    return 1 if crash else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
