"""The complete examples: each is valid as shipped, says what to edit, and can be planned from data sheets anywhere."""

import json
import os
from pathlib import Path

import pytest

from dflop import resources
from dflop.config import load_config, load_with_origins
from dflop.steps.preflight import problems
from tests.forked import run_module

EXAMPLES = sorted((resources.path("configs") / "examples").glob("*.yaml"))
PLAN_TIMEOUT_S = 540


def device_of(path: Path) -> str:
    return path.stem.rpartition("_")[2]


def test_models_and_devices_are_complete():
    models = {"llava_onevision_7b", "llava_onevision_72b", "internvl2_5_8b", "internvl2_5_78b", "qwen2_5_vl_7b",
              "qwen2_audio_7b"}  # fmt: skip
    complete = {f"{model}_{device}" for model in models for device in ("a100", "h100")}
    assert {path.stem for path in EXAMPLES} == complete | {"llava_onevision_72b_lora_h100"}


def test_examples_are_valid_and_say_what_to_edit():
    for path in EXAMPLES:
        loaded = load_with_origins(path)
        assert loaded.config.name == path.stem
        assert [p.error for p in problems(loaded.config, loaded.origins) if not p.is_of_machine] == []
        text = path.read_text()
        assert text.count("EDIT") >= 4
        assert "invented" in text
        assert f"--device {device_of(path)}" in text
        assert device_of(path).upper() in loaded.config.cluster.hardware
        cluster = (path.parent / f"../clusters/{loaded.config.cluster.name}.yaml").resolve()
        assert cluster.read_text().startswith("# An invented cluster")


@pytest.mark.timeout(PLAN_TIMEOUT_S + 30)
@pytest.mark.lane("instances")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_planned_from_a_data_sheet(path, tmp_path):
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    arguments = ("plan", str(path), "--device", device_of(path), "--json")
    environment = {**os.environ, "PATH": "/nowhere"}  # without Slurm, the profile of the demo is made here
    done = run_module("dflop.cli", *arguments, cwd=tmp_path, env=environment, timeout_s=PLAN_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    plans = [json.loads(line) for line in done.stdout.splitlines()]
    config = load_config(path)
    cluster = config.cluster.num_nodes * config.cluster.num_processes_per_node
    assert f"320 samples, {cluster} processes; simulated, costs analytic" in done.stderr
    assert [plan["rank"] for plan in plans] == [str(rank) for rank in range(len(plans))]
    assert 0 < int(plans[0]["processes"]) <= cluster
