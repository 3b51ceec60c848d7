"""The list of parts is whole and fits its time; what becomes of parts that miss a bound, fail or cannot run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import __main__ as command_line
from tests.bench import campaign
from tests.bench.__main__ import listing
from tests.bench.campaign import command_of, missing, run, summary, told_command
from tests.bench.figures import ROOT, slug
from tests.bench.parts import NEEDS, PARTS, SUBSET_MINUTES, Part, chosen

STAND_IN = """
import argparse, sys
from pathlib import Path
from tests.bench.figures import conclude
parser = argparse.ArgumentParser()
parser.add_argument("--json", type=Path)
parser.add_argument("--sizes", default="none")
parser.add_argument("what")
args = parser.parse_args()
if args.what == "fail":
    args.json.write_text("{}")
    raise ValueError("broken")
if args.what == "nothing":
    sys.exit(0)
args.json.with_suffix(".svg").write_text("<svg/>")
conclude({"sizes": args.sizes}, [("fast", True), ("small", args.what == "good")], args.json)
"""


def stand_in(what: str, **more: object) -> Part:
    return Part(what, f"a part that is {what}", "stand_in", 1.0, (what,), **more)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path / "results"


def test_the_subset_takes_twenty_minutes_at_most():
    minutes = [part.minutes_of(False) for part in PARTS if part.subset is not None]
    assert min(minutes) > 0
    assert sum(minutes) <= SUBSET_MINUTES


def test_every_benchmark_is_a_part_and_every_part_is_a_command():
    commands = {f"tests.bench.{path.parent.name}" for path in (ROOT / "tests" / "bench").glob("*/__main__.py")}
    assert {part.module for part in PARTS} == commands - {"tests.bench.pages"}
    assert all(importlib.util.find_spec(f"{part.module}.__main__") for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(set(part.needs) <= set(NEEDS) for part in PARTS)


def test_a_smaller_measurement_has_a_name_of_its_own():
    small = Part("a", "", "m", 2.0, ("--seeds", "5"), ("--seeds", "1"), 1.0)
    assert [small.result_name(is_full) for is_full in (True, False)] == ["a", "a-subset"]
    same = Part("a", "", "m", 2.0, (), (), 2.0)
    assert [same.result_name(is_full) for is_full in (True, False)] == ["a", "a"]
    assert Part("a", "", "m", 2.0, ("--x",)).args_of(False) == ("--x",)


def test_parts_are_chosen_by_name_or_by_how_much_is_wanted():
    assert chosen(None, True) == list(PARTS)
    assert {part.name for part in chosen(None, False)} < {part.name for part in PARTS}
    assert [part.name for part in chosen(["suite", "cost"], False)] == ["suite", "cost"]
    with pytest.raises(ValueError, match=r"no part is called sute; there are store, data"):
        chosen(["sute"], False)


def test_what_is_measured_is_kept_by_machine_and_date(results, capfd):
    part = stand_in("good", takes=("sizes",))
    (outcome,) = run([part], {"sizes": "/home/somebody/table"}, results, is_full=True)
    assert (outcome.verdict, outcome.num_bounds, outcome.missed) == ("ok", 2, ())
    content = json.loads(outcome.file.read_text())
    about = content["machine"]
    assert outcome.file == results / slug(about) / f"good-{about['date']}.json"
    assert content["sizes"] == "/home/somebody/table"
    assert content["command"] == "python -m stand_in good --sizes TABLE --json good.json"
    assert {path.suffix for path in outcome.file.parent.iterdir()} == {".json", ".svg"}
    assert "[1/1] good, about 1 min" in capfd.readouterr().err


def test_what_is_missed_fails_or_lacks_something_is_said_and_the_rest_runs(results):
    parts = [
        stand_in("fail"),
        stand_in("nothing"),
        stand_in("bad"),
        stand_in("held", needs=("times",)),
        stand_in("good"),
    ]
    outcomes = list(run(parts, {}, results, is_full=True))
    assert [o.verdict for o in outcomes] == ["failed", "failed", "missed", "left out", "ok"]
    assert [o.is_good for o in outcomes] == [False, False, False, True, True]
    failed, nothing, bad, held, _ = outcomes
    assert "exit code 1; what it left is in" in failed.reason
    assert failed.file is None
    assert nothing.reason == "it wrote no figures"
    assert json.loads(bad.file.read_text())["missed"] == ["small"]
    assert held.reason == f"needs {NEEDS['times']}"
    lines = summary(outcomes)
    assert len(lines) == 1 + len(parts) + 1
    assert lines[-1] == "bad missed: small"
    assert "1/2" in lines[3]


def test_what_is_done_is_told_when_the_rest_is_stopped(tmp_path, monkeypatch, capsys):
    def stopped(*_args, **_options):
        yield campaign.Outcome("cost", "ok", 0.2, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", stopped)
    monkeypatch.setattr(sys, "argv", ["bench", "--part", "cost", "suite"])
    with pytest.raises(SystemExit, match="stopped; the parts above are done"):
        command_line.main()
    assert "2/2  ok" in capsys.readouterr().out


def test_a_part_is_left_out_without_what_it_needs(monkeypatch, tmp_path):
    part = stand_in("good", needs=("rivals", "slurm"))
    monkeypatch.setattr(campaign, "ORTOOLS", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing(part, {"slurm": ""}) == [NEEDS["rivals"], NEEDS["slurm"]]
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setattr(campaign, "ORTOOLS", tmp_path)
    assert missing(part, {"slurm": ""}) == []
    assert missing(part, {}) == [NEEDS["slurm"]]


def test_the_listing_says_what_is_left_out_and_what_was_not_asked_for():
    lines = listing(chosen(["cost", "replay"], False), {}, False)
    assert lines[2].endswith(f"(left out: needs {NEEDS['times']})")
    assert lines[3].split() == ["all", "0.1"]
    assert lines[4].startswith("not asked for: store, data")


def test_options_reach_those_who_take_them():
    part = Part("a", "", "m", 1.0, ("--plot", "{stem}.svg"), takes=("sizes",), needs=("times", "slurm"))
    given = {"sizes": "s", "times": "t", "media": "x", "slurm": ""}
    assert command_of(part, given, Path("/r/a.json"), True) == [
        sys.executable, "-m", "m", "--plot", "/r/a.svg", "--sizes", "s", "--times", "t", "--json", "/r/a.json",
    ]  # fmt: skip
    assert told_command(part, given, True) == "python -m m --plot a.svg --sizes TABLE --times FILE --json a.json"


def test_the_command_refuses_what_is_not_there():
    command = [sys.executable, "-m", "tests.bench", "--sizes", "no/such.parquet"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--sizes no/such.parquet: no such file or folder" in ended.stderr
