"""`dflop profile`, `dflop cost`, `dflop plan` and `dflop compare` as a person uses them."""

import json
import re
import shlex
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from dflop import units
from dflop.cli import app
from dflop.cost.devices import H200
from dflop.cost.published import RUNS
from dflop.records import ProfileRecord
from tests.builders import make_table
from tests.jobs.configs import write_demo_config
from tests.report.test_cost_plots import probes
from tests.store.asking import fill
from tests.test_cli import assert_refused, dflop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cost")
    write_demo_config(
        folder, 32, "plan.global_batch_size=8", "plan.microbatch_choices=[2, 4]", "model_profile.budget_s=3",
        "model_profile.num_probes=8", "model_profile.num_repeats=1", "model_profile.links_budget_s=0.5",
    )  # fmt: skip
    return folder


def run(folder: Path, command: str, *arguments: str) -> tuple[list[str], str]:
    done = dflop(command, *arguments, cwd=folder, DFLOP_STORE=str(folder / "store"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines(), done.stderr


def test_without_measured_costs_the_error_says_how_to_get_some(folder: Path) -> None:
    done = dflop("plan", folder / "run.yaml", cwd=folder)
    assert_refused(done, 1, "no cost tables of this model on", "dflop profile CONFIG", "--device h100")
    assert_refused(dflop("plan", folder / "run.yaml", "--device", "h300", cwd=folder), 2, "h300", "h100")


def test_a_plan_from_a_data_sheet_needs_no_hardware(folder: Path) -> None:
    rows, talk = run(folder, "plan", "run.yaml", "--device", "h200", "--format", "json")
    plans = [json.loads(line) for line in rows]
    assert [p["rank"] for p in plans] == [str(i) for i in range(len(plans))]
    assert all(float(p["tokens/s/GPU"].replace(",", "")) > 0 and p["MFU"].endswith("%") for p in plans)
    assert H200.source in talk
    assert "GPU-hours" in talk
    assert "if encoders took 2 times as long" in talk


def test_terms_by_a_data_sheet_stand_above_published_trainings(folder: Path) -> None:
    rows, talk = run(folder, "cost", "published", "run.yaml", "--device", "h200", "--json")
    terms = [json.loads(line) for line in rows]
    assert H200.source in talk
    assert {(t["used"], t["measured"]) for t in terms} == {("data sheet", None)}
    layer = next(t for t in terms if t["name"] == "llm tp1: forward of a layer")
    shown, _ = run(folder, "cost", "published", "run.yaml", "--device", "h200")
    (line,) = (line for line in shown if line.startswith(layer["name"]))
    assert units.seconds(layer["sheet"]) in line
    published = [r for r in RUNS if r.device == "H200"]
    assert [r.model for r in published] == [x.split()[0] for x in shown if x.startswith(tuple(r.model for r in RUNS))]


def test_costs_in_the_store_are_shown_and_drawn(folder: Path, tmp_path: Path) -> None:
    tables = [replace(make_table(module), source="measured", num_measurements=24) for module in ("llm", "vision")]
    inputs = json.dumps({"family": "tiny", "hardware": "test"})
    profile = ProfileRecord("model", "model", "run", inputs, 48, 0, 1000.0, 1.0)
    fill(tmp_path / "store", profile, *tables, *(probe for table in tables for probe in probes(table)))
    rows, _ = run(tmp_path, "cost", "show", "mod", "--format", "json")
    assert [(row["module"], row["source"], row["probes"]) for row in map(json.loads, rows)] == [
        ("llm", "measured", 24), ("vision", "measured", 24),
    ]  # fmt: skip
    shown, _ = run(tmp_path, "cost", "show")
    assert any("residual" in line for line in shown)
    (picture,), _ = run(tmp_path, "cost", "show", "--output", "cost.svg")
    assert (tmp_path / picture).read_text().startswith("<?xml")


def compared(folder: Path, *arguments: str) -> str:
    """What `dflop compare` says, after a look at its numbers."""
    given = ("run.yaml", "--num-batches", "3", "--usd-per-gpu-hour", "2", "--format", "json")
    rows, talk = run(folder, "compare", *given, *arguments)
    found = {row["what"].removesuffix(" (exceeds memory)"): row for row in map(json.loads, rows)}
    ours, tuned = found["dflop"], found["uniform, tuned"]
    assert tuned["speedup"] == 1.0
    assert ours["step_s"] <= 1.02 * tuned["step_s"]
    assert ours["usd"] == pytest.approx(2 * ours["gpu_hours"]) == pytest.approx(ours["step_s"] * 4 * 10_000 / 3600 * 2)
    assert found["perfect balance, no bubble"]["step_s"] < ours["step_s"]
    return talk


def command_of_page(page: Path) -> list[str]:
    found = re.search("<dt>command</dt><dd>dflop (.*)</dd>", page.read_text())
    assert found is not None
    return shlex.split(unescape(found[1]))


def test_a_comparison_from_a_data_sheet_and_its_page(folder: Path) -> None:
    given = ("--device", "h100", "--gpus", "4", "--gpus-per-node", "2", "--html", "a page.html")
    talk = compared(folder, *given)
    assert "simulated on 3 held-out batches; costs analytic" in talk
    _, bound, _ = app.parse_args(command_of_page(folder / "a page.html"))
    assert bound.arguments == {
        "config": Path("run.yaml"), "device": "h100", "gpus": 4, "gpus_per_node": 2, "num_batches": 3,
        "num_steps": 10_000, "usd_per_gpu_hour": 2.0, "html": Path("a page.html"),
    }  # fmt: skip


@pytest.mark.lane("people")
def test_the_command_on_a_page_makes_the_page_again(folder: Path) -> None:
    page = folder / "again.html"
    given = ("--device", "h200", "--gpus", "2", "--policy", "token_kk", "--set", "plan.microbatch_choices=[2]")
    run(folder, "compare", "run.yaml", *given, "--num-batches", "1", "--batch", "4", "--html", page.name)
    first, command = page.read_text(), command_of_page(page)
    page.unlink()
    run(folder, *command)
    assert page.read_text() == first


@pytest.mark.lane("jobs")
def test_a_profile_is_made_once_and_planned_and_compared_with(folder: Path) -> None:
    (key,), talk = run(folder, "profile", "run.yaml")
    assert talk.count("held-out error: median") == 3
    (again,), talk = run(folder, "profile", "run.yaml")
    assert again == key
    assert "is in the store" in talk
    rows, _ = run(folder, "cost", "show", key[:7], "--format", "json")
    tables = [json.loads(line) for line in rows]
    assert [t["module"] for t in tables] == ["audio", "llm", "vision"]
    assert all(t["source"] == "measured" and t["probes"] >= 12 for t in tables)
    links, _ = run(folder, "sql", "link_costs", "--format", "json")
    assert {json.loads(line)["op"] for line in links} == {"p2p", "all_reduce", "all_gather"}
    _, talk = run(folder, "plan", "run.yaml")
    assert "costs measured on" in talk
    assert "simulated on 3 held-out batches; costs measured on" in compared(folder)
