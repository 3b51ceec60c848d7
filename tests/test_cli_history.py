"""`dflop history` as a person meets it: its own process, data on stdout, talk on stderr."""

import csv
import io
import json
from pathlib import Path

import pytest

from dflop.store import live, settings
from dflop.store.ingest import freshen, ingest
from dflop.store.snapshot import read_current
from tests.builders import make_decision
from tests.jobs.configs import write_config
from tests.store.asking import write
from tests.story import story
from tests.test_cli import dflop

RUN = "demo-1"
KINDS = ["run", "plan", "job", "correction", "correction", "rescale", "scheduler_late", "slow_rank", "drift_shapes"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write(tmp_path / "store", *story(RUN), run_id=RUN)
    return tmp_path / "store"


@pytest.fixture
def run_dir(store: Path) -> Path:
    folder = store.parent / "runs" / RUN
    folder.mkdir(parents=True)
    write_config(store.parent).rename(folder / "config.resolved.yaml")
    return folder


def test_a_run_directory_finds_its_store_and_brings_its_rows_in(store: Path, run_dir: Path) -> None:
    done = dflop("history", run_dir, cwd=store.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "dflop abc on 8x test" in done.stdout
    assert "vision tp1 pp1 dp1 | llm tp1 pp1 dp3, 4 microbatches: 1.5 s a step" in done.stdout
    assert done.stdout.index("slow rank") < done.stdout.index("drift shapes") < done.stdout.index("0:01:13")
    assert "No events" not in done.stdout
    write(store, make_decision("rescale", "done", run_id=RUN, detail="x1.30", observed_at_s=1200.0), run_id=RUN)
    assert "x1.30" in dflop("history", run_dir, cwd=store.parent).stdout


def test_programs_get_json_and_csv_and_prefect_markdown(store: Path) -> None:
    given = ("history", RUN, "--store", store)
    found = [json.loads(line) for line in dflop(*given, "--format", "json", cwd=store.parent).stdout.splitlines()]
    assert [row["kind"] for row in found[: len(KINDS)]] == KINDS
    replan = found[len(KINDS) + 1]
    assert (replan["verdict"], replan["gain_s"], replan["cost_s"], replan["step"]) == ("done", 54.0, 20.0, 40)
    assert found[0]["gain_s"] is None
    rows = list(csv.DictReader(io.StringIO(dflop(*given, "--format", "csv", cwd=store.parent).stdout)))
    assert [row["elapsed_s"] for row in rows] == [str(row["elapsed_s"]) for row in found]
    shown = dflop(*given, "--format", "markdown", cwd=store.parent).stdout
    assert shown.startswith("## History\n")
    assert "| 0:00:40 | 20 | slow rank | noticed | rank 2: 30 % slower than its peers on host1 |" in shown
    assert len([line for line in shown.splitlines() if line.startswith("| 0:")]) == len(found)


def test_a_store_that_somebody_is_at_is_left_alone(store: Path) -> None:
    ingest(store)
    write(store, make_decision("reprofile", "done", observed_at_s=1200.0), run_id=RUN, producer="q")
    with live.hold(store):
        assert freshen(store, RUN) == 1
        assert freshen(store, "another") == 0
        assert read_current(store).seq == 1
        done = dflop("history", RUN, "--store", store, "--format", "json", cwd=store.parent)
    assert "1 files of the run are not ingested" in done.stderr
    assert "reprofile" not in done.stdout
    assert freshen(store, RUN) == 0
    assert read_current(store).seq == 2
    assert freshen(store, RUN) == 0
    assert read_current(store).seq == 2


def test_no_node_builds_a_live_database_to_tell_a_history(store: Path) -> None:
    ingest(store)
    write(store, make_decision("rescale", "done", observed_at_s=1200.0), run_id=RUN, producer="q")
    settings.init(store, live=store.parent / "elsewhere")
    assert freshen(store, RUN) == 1
    assert not (store.parent / "elsewhere").exists()
