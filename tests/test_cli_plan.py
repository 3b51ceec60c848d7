"""`dflop plan` as a person uses it: explanations, pictures, files for other trainers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.configs import write_config
from tests.test_cli import assert_refused, dflop

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose dataset and costs need nothing but data sheets."""
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    folder = tmp_path_factory.mktemp("plan")
    demo = folder / "demo"
    write_config(
        folder, f"model={ROOT}/configs/models/tiny_omni.yaml", "dataset.demo=true", "dataset.demo_num_samples=32",
        f"dataset.annotations={demo}/annotations.jsonl", f"dataset.media_root={demo}/media",
        f"dataset.tokenizer={demo}/tokenizer.json", "plan.global_batch_size=8", "plan.microbatch_choices=[2, 4]",
        "plan.num_scenarios=2",
    )  # fmt: skip
    return folder


def plan(folder: Path, *arguments: object) -> tuple[str, str]:
    """(stdout, stderr)."""
    done = dflop("plan", "run.yaml", "--device", "h100", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_an_explanation_is_data_and_its_progress_is_talk(folder: Path) -> None:
    out, talk = plan(folder, "--explain", "--picture", "step.svg")
    for heading in ("Candidates", "What limits the plan", "Where the step goes", "Other circumstances"):
        assert heading in out
        assert heading not in talk
    assert out.splitlines()[-1].startswith("Simulated; costs analytic, H100 SXM: never measured (")
    assert "planning with one node more" in talk
    assert "planning with" not in out
    assert (folder / "step.svg").read_text().startswith("<svg")
    assert "picture of a step: step.svg" in talk


def test_an_explanation_for_programs_is_one_object_of_the_same_plans(folder: Path) -> None:
    out, _ = plan(folder, "--explain", "--format", "json")
    found = json.loads(out)
    assert found["simulated"] is True
    assert found["source"] == "analytic, H100 SXM: never measured"
    num_gpus = {variation["name"]: variation["num_gpus"] for variation in found["variations"]}
    assert found["variations"][0]["num_gpus"] == 4
    assert (num_gpus["half the node"], num_gpus["one node more"]) == (2, 8)
    emitted, talk = plan(folder, "--emit", "json")
    document = json.loads(emitted)
    assert (document["schema"], document["plan_id"]) == ("dflop.plan", found["plans"][0]["plan_id"])
    assert found["plans"][0]["reason"] in talk
    assert "4 processes; simulated" in talk


def test_with_emit_the_explanation_leaves_stdout_to_the_file(folder: Path) -> None:
    out, talk = plan(folder, "--gpus", "8", "--emit", "megatron-mimo", "--explain")
    assert "megatron_mimo_parallelism_config" in out
    assert "Candidates" not in out
    assert "Candidates" in talk
    assert "`megatron-mimo` accepts, and runs in arrival order, " in talk
    assert "It runs in arrival order, as the trainer it is for does not look at the data." in talk


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--emit", "megatron"), ("cannot emit `megatron`", "megatron-mimo, torchrun")),
        (("--explain", "--format", "csv"), ("an explanation is several tables", "--format table or json")),
        (("--picture", "step.gif"), ("cannot draw a `.gif` file", ".png, .svg, .pdf")),
        (("--gpus", "0"), ("cannot plan for 0 GPUs",)),
        (("--gpus", "6"), ("6 GPUs are not whole nodes of 4",)),
    ],
)
def test_what_cannot_be_is_refused_before_the_dataset_is_looked_at(tmp_path, arguments, said) -> None:
    write_config(tmp_path)
    assert_refused(dflop("plan", "run.yaml", *arguments, cwd=tmp_path), 2, *said)


def test_a_plan_that_does_not_fit_says_what_would(folder: Path) -> None:
    # A data sheet brings its own, large memory: what fails here is three modules on one process.
    done = dflop(
        "plan", "run.yaml", "--device", "h100", "--gpus", "1", "--set", "plan.layouts=[split]", cwd=folder
    )  # fmt: skip
    assert done.returncode == 3
    assert "hint:" in done.stderr
    assert done.stdout == ""
