"""`dflop plan` as a person uses it: explanations, pictures, files for other trainers, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from ruamel.yaml import YAML

from dflop import resources
from dflop.config import load_config, load_mixture
from dflop.cost.devices import H100
from dflop.data.demo import make_demo_dataset
from dflop.store.console import query
from tests.data.helpers import chat
from tests.jobs.configs import write_config, write_demo_config
from tests.test_cli import assert_refused, dflop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose dataset and costs need nothing but data sheets."""
    folder = tmp_path_factory.mktemp("plan")
    write_demo_config(folder, 16, "plan.global_batch_size=8", "plan.microbatch_choices=[2]", "plan.num_scenarios=2")
    return folder


def plan(folder: Path, *arguments: object) -> tuple[str, str]:
    """(stdout, stderr)."""
    done = dflop("plan", "run.yaml", "--device", "h100", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_a_trainer_that_does_not_look_at_the_data_gets_a_plan_for_arrival_order(folder: Path) -> None:
    out, talk = plan(folder, "--gpus", "8", "--emit", "megatron-mimo")
    assert "megatron_mimo_parallelism_config" in out
    assert "fastest of" in talk, "why, where nobody asks for an explanation"
    assert "emitted for `megatron-mimo`: " in talk
    assert "It runs in arrival order, as its trainer does not balance batches." in talk


def test_a_trainer_that_packs_samples_gets_the_best_plan_that_its_keys_can_say(folder: Path) -> None:
    out, talk = plan(folder, "--gpus", "8", "--emit", "veomni")
    assert YAML(typ="safe").load(out)["train"]["accelerator"]["fsdp_config"]["fsdp_mode"] == "fsdp2"
    assert "emitted for `veomni`: " in talk
    assert ", in packs, " in talk


@pytest.fixture(scope="module")
def explained(folder: Path) -> tuple[dict[str, Any], str]:
    """The explanation for programs, and what was said meanwhile."""
    out, talk = plan(folder, "--explain", "--picture", "step.svg", "--format", "json")
    return json.loads(out), talk


def test_an_explanation_is_data_and_its_progress_is_talk(folder: Path, explained: tuple[dict[str, Any], str]) -> None:
    found, talk = explained
    assert found["simulated"] is True
    assert found["source"] == H100.source
    num_gpus = {variation["name"]: variation["num_gpus"] for variation in found["variations"]}
    assert found["variations"][0]["num_gpus"] == 4
    assert (num_gpus["half the node"], num_gpus["one node more"]) == (2, 8)
    assert "planning with one node more" in talk
    assert " a step: of published language models with " in talk
    assert "none of this size and device is near" in talk
    assert (folder / "step.svg").read_text().startswith("<svg")
    assert "picture of a step: step.svg" in talk
    plan_id = found["plans"][0]["plan_id"]
    ((costs, *_), *_) = query(folder / "store", f"select costs_text from v_plan where plan_id = '{plan_id}'")[1]
    error = f"±{100 * H100.accuracy.median_frac:.0f} % against {H100.accuracy.num_runs} published runs"
    assert f"llm analytic, H100 SXM: {error}" in costs
    assert "vision analytic, H100 SXM: ±15 % with no published run" in costs


def test_with_emit_the_explanation_leaves_stdout_to_the_file(
    folder: Path, explained: tuple[dict[str, Any], str]
) -> None:
    out, talk = plan(folder, "--emit", "json", "--explain", "--html", "plan.html")
    page = (folder / "plan.html").read_text()
    assert "dflop plan run.yaml --device h100" in page
    assert "likely step" in page
    document = json.loads(out)
    assert (document["schema"], document["plan_id"]) == ("dflop.plan", explained[0]["plans"][0]["plan_id"])
    for heading in (
        "Candidates",
        "What limits the plan",
        "Where the step goes",
        "What-if analysis",
        "Costs term by term",
    ):
        assert heading in talk
    assert "4 processes; simulated" in talk
    assert talk.splitlines()[-1].startswith(f"Simulated; costs {H100.source} (")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--emit", "megatron"),
            ("cannot emit `megatron`", "megatron-bridge, megatron-mimo, ms-swift, torchrun, torchtitan, veomni"),
        ),
        (("--explain", "--format", "csv"), ("an explanation is several tables", "--format table or json")),
        (("--batch", "8,x"), ("`8,x` is no list of global batch sizes", "--batch 128,256,512")),
    ],
)
def test_what_cannot_be_is_refused_before_the_dataset_is_looked_at(tmp_path, arguments, said) -> None:
    write_config(tmp_path)
    assert_refused(dflop("plan", "run.yaml", *arguments, cwd=tmp_path), 2, *said)


def test_a_model_and_its_data_get_a_plan_without_a_configuration(tmp_path: Path) -> None:
    hf_config = YAML(typ="safe").load(resources.path("configs") / "models" / "tiny_omni.yaml")["hf_config"]
    (tmp_path / "model").mkdir()
    content = transformers.Qwen2_5OmniThinkerConfig(**hf_config).to_dict()
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    assert_refused(dflop("plan", "model", cwd=tmp_path), 2, "`model` is a model", "model DATA")
    make_demo_dataset(tmp_path / "data", 16)
    (tmp_path / "chat.jsonl").write_text((json.dumps(chat("what?", "that")) + "\n") * 8)
    tokenizer = (tmp_path / "data" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    given = ["plan", "model", "data", "chat.jsonl", "--device=a100", "--gpus=4", "--set=plan.microbatch_choices=[2]"]
    assert_refused(dflop(*given, cwd=tmp_path), 2, "no tokenizer.json", "--set dataset.tokenizer=PATH")
    given += ["--set", f"dataset.tokenizer={tokenizer}", "--batch", "16,8"]
    done = dflop(*given, cwd=tmp_path, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert re.search(r"found    data: \.dflop/configurations/mixture-\w+\.yaml, mixture, 24 rows", done.stderr)
    assert "assumed  cluster" in done.stderr
    assert "assumed  plan.global_batch_size" not in done.stderr
    assert "Plan and next-best plans" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    sizes = re.findall(r"^ +(8|16)  ", done.stdout.partition("Plan and")[0], re.M)
    assert f"a global batch of {sizes[0]} takes the fewest GPU-hours per token, its speed " in done.stderr
    assert f"x that of {sizes[1]}" in done.stderr
    (made,) = (tmp_path / ".dflop" / "configurations").glob("qwen2_5_omni*")
    entries = load_mixture(tmp_path / load_config(made).dataset.annotations).datasets
    assert [entry.path for entry in entries] == ["data/annotations.jsonl", "chat.jsonl"]


def test_a_plan_that_does_not_fit_says_what_would(folder: Path) -> None:
    # A data sheet brings its own, large memory: what fails here is three modules on one process.
    done = dflop(
        "plan", "run.yaml", "--device", "h100", "--gpus", "1", "--set", "plan.share_ranks=[false]", cwd=folder
    )  # fmt: skip
    assert done.returncode == 3
    assert "hint:" in done.stderr
    assert done.stdout == ""
