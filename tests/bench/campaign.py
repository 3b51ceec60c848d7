"""Runs parts of the benchmark one after the other, and keeps what they measured by machine and date."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.command import ORTOOLS
from tests.bench.figures import ROOT, json_text, machine, slug
from tests.bench.parts import NEEDS, Part

RESULTS = ROOT / "tests" / "bench" / "results"


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: str
    verdict: str
    """`ok`, `missed`, `failed` or `left out`."""
    minutes: float = 0.0
    num_bounds: int | None = None
    missed: tuple[str, ...] = ()
    file: Path | None = None
    reason: str = ""

    @property
    def is_good(self) -> bool:
        return self.verdict in ("ok", "left out")


def missing(part: Part, given: Mapping[str, str]) -> list[str]:
    """What a part needs and does not have, and how to give it."""
    have = {*given, *(["rivals"] if ORTOOLS.is_dir() else [])}
    if "slurm" in given and shutil.which("sbatch") is None:
        have.discard("slurm")
    return [NEEDS[need] for need in part.needs if need not in have]


def run(parts: Sequence[Part], given: Mapping[str, str], out: Path, *, is_full: bool) -> Iterator[Outcome]:
    """Every part in a process of its own; a failed one does not keep the others from running.

    Args:
        parts: In this order.
        given: Options that were given, by name, and what they were given.
        out: Gets a folder of this machine's.
        is_full: Whether parts are measured whole.
    """
    for number, part in enumerate(parts, start=1):
        head = f"[{number}/{len(parts)}] {part.name}"
        if without := missing(part, given):
            _say(f"{head} is left out: needs {'; '.join(without)}")
            yield Outcome(part.name, "left out", reason=f"needs {'; '.join(without)}")
            continue
        _say(f"{head}, about {part.minutes_of(is_full):g} min: {part.what}")
        outcome = _measured(part, given, out, is_full)
        _say(f"{head}: {outcome.verdict} after {outcome.minutes:.1f} min")
        yield outcome


def _measured(part: Part, given: Mapping[str, str], out: Path, is_full: bool) -> Outcome:
    found = machine()
    folder = out / slug(found)
    unfinished = folder / f"{part.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    path = unfinished / f"{part.result_name(is_full)}-{found['date']}.json"
    command = command_of(part, given, path, is_full)
    _say(f"  {told_command(part, given, is_full)}")
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    minutes = (time.monotonic() - started) / 60
    content = json.loads(path.read_text()) if path.is_file() else {}
    missed = tuple(content.get("missed", ()))
    if not content or (code and not missed):
        reason = f"exit code {code}; what it left is in {unfinished}" if code else "it wrote no figures"
        return Outcome(part.name, "failed", minutes, reason=reason)
    told = {**content, "command": told_command(part, given, is_full), "minutes": round(minutes, 1)}
    path.write_text(json_text(told))
    for file in unfinished.iterdir():  # pictures beside the figures, too
        file.replace(folder / file.name)
    unfinished.rmdir()
    verdict = "missed" if missed else "ok"
    return Outcome(part.name, verdict, minutes, content.get("num_bounds"), missed, folder / path.name)


def command_of(part: Part, given: Mapping[str, str], path: Path, is_full: bool) -> list[str]:
    """The command line of a part that writes its figures to `path`."""
    options = [word for name in (*part.takes, *part.needs) if given.get(name) for word in (f"--{name}", given[name])]
    stem = str(path.with_suffix(""))
    own = [arg.replace("{stem}", stem) for arg in part.args_of(is_full)]
    return [sys.executable, "-m", part.module, *own, *options, "--json", str(path)]


def told_command(part: Part, given: Mapping[str, str], is_full: bool) -> str:
    """The same for documents: without the paths of whoever ran it."""
    words = {name: NEEDS[name].split()[-1] if path else "" for name, path in given.items()}
    return " ".join(["python", *command_of(part, words, Path(f"{part.name}.json"), is_full)[1:]])


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """A table for people: what was missed or failed is named below it."""
    lines = [f"{'part':22s} {'minutes':>7s} {'bounds met':>10s}  {'':9s} file"]
    for o in outcomes:
        met = "" if not o.num_bounds else f"{o.num_bounds - len(o.missed)}/{o.num_bounds}"
        minutes = f"{o.minutes:.1f}" if o.verdict != "left out" else ""
        lines.append(f"{o.part:22s} {minutes:>7s} {met:>10s}  {o.verdict:9s} {_shown(o.file) if o.file else o.reason}")
    lines += [f"{o.part} missed: {name}" for o in outcomes for name in o.missed]
    return lines


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
