"""People's tasks from beginning to end, as scripts whose headers count commands and decisions.

`-s` shows what each prints, as the person sees it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.people import given

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CLIENTS = Path(sys.prefix) / "clients"
pytestmark = [pytest.mark.lane("people"), pytest.mark.timeout(600)]


def run(script: str, folder: Path, **more: str) -> str:
    """What a person sees who runs it in the folder, on a terminal of 80 columns."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": "80", **more}
    done = subprocess.run(
        ["bash", HERE / script], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def test_own_data_gets_a_layout_and_what_it_is_worth(tmp_path: Path) -> None:
    given.a_model_and_photos(tmp_path)
    plan, _, compare = run("own_data.sh", tmp_path).partition("$ dflop compare")
    assert "photos/captions.jsonl, JSON Lines, 640 rows" in plan
    assert "assumed  plan.global_batch_size: 512, 8 for each of 64 GPUs" in plan
    assert re.search(r"simulated: [\d,]+ tokens/s/GPU, MFU \d+%", plan)
    assert re.search(r"fastest of \d+ simulated plans", plan)
    assert re.search(r"dflop's plan is [\d.]+x .* as fast as the best expert baseline", compare)
    assert re.search(r"^dflop +colocated .* \d+$", compare, re.M), "with a price in the last column"


def test_a_trainer_is_balanced_by_one_import(tmp_path: Path) -> None:
    given.texts(tmp_path)
    shutil.copy(HERE / "train.py", tmp_path)
    estimate, *trained = run("balanced_trainer.sh", tmp_path).split("$ torchrun")
    assert re.search(r"dflop +\d", estimate)
    assert re.search(r"(dflop: [\d.]+x over|Keep group_by_length if correlated batches)", estimate)
    assert "balancing" not in trained[0]
    assert re.search(r"balancing 16 samples a step over 2 rank\(s\) x 1 microbatch", trained[1])
    assert re.search(r"'dflop/waiting_frac': '?[\d.]", trained[1])
    assert re.search(r"balanced \d+ steps: waiting", trained[1])
    assert "padding" in trained[1]
    assert "padding" not in trained[2]
    losses = [[float(x) for x in re.findall(r"'loss': '?([\d.]+)", text)] for text in trained]
    assert all(len(of) >= 6 and of[-1] < of[0] for of in losses), losses
    assert losses[0] != losses[1], "other batches, so other losses"
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.05)
    assert losses[2] == pytest.approx(losses[1], rel=1e-3), "the same batches, packed"


def test_a_slow_night_is_explained_by_the_store(tmp_path: Path) -> None:
    config = given.configuration_of_last_night(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "tests.people.given", config], cwd=tmp_path, env=env, check=True)
    out = run("slow_night.sh", tmp_path)
    listed, slowdown, ranks, hosts, steps = re.split(r"^\$ dflop .*\n", out, flags=re.M)[1:]
    assert "slowest_steps" in listed
    assert re.search(r"quarter_of_run +4", slowdown)
    assert re.search(r"rank +1\n.*?is_slow +True", ranks, re.S)
    assert "num_slow_runs" in hosts
    assert "server-log" in steps or "whole-book" in steps


def test_adapters_are_trained_on_own_data_and_become_a_folder_of_peft(tmp_path: Path) -> None:
    given.a_configuration_and_photos(tmp_path)
    trained, validation, exported, listed = re.split(
        r"^\$ (?:dflop sql|dflop export|ls) .*\n", run("lora.sh", tmp_path), flags=re.M
    )
    assert re.search(r"validation after step \d+: loss [\d.]+ over \d samples", trained)
    losses = [float(loss) for loss in re.findall(r"^\s*(?:\d+) +(?:- +|)?(\d+\.\d+)", validation, re.M)]
    assert exported.strip().splitlines()[-1].endswith("adapters")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(listed.split())
    assert losses[-1] < losses[0]


def test_rollouts_are_dealt_by_cost(tmp_path: Path) -> None:
    shutil.copy(HERE / "rollouts.py", tmp_path)
    out = run("rollouts.sh", tmp_path)
    assert re.search(r"\d+ microbatches on each of 2 ranks", out)
    found = re.search(r"slowest rank over the bound: ([\d.]+); error of the gradient: ([\d.e-]+)", out)
    assert found
    assert float(found[1]) < 1.05
    assert float(found[2]) < 1e-5


@pytest.mark.skipif(not (CLIENTS / "trl").is_dir(), reason="needs TRL: make references")
def test_rollouts_of_trl_are_dealt_after_they_are_scored(tmp_path: Path) -> None:
    for file in ("grpo.py", "tiny_vlm.py"):
        shutil.copy(HERE / file, tmp_path)
    out = run("grpo.sh", tmp_path, PYTHONPATH=f"{CLIENTS / 'trl'}:{CLIENTS / 'datasets'}")
    waiting = r"predicted waiting ([\d.]+)% as generated, ([\d.]+)% tokens balanced, ([\d.]+)% dealt"
    (generated, by_tokens, dealt), *others = [[float(frac) for frac in of] for of in re.findall(waiting, out)]
    assert dealt < min(generated, by_tokens), "some of them moved"
    assert len(others) == 2
    assert max(of[2] for of in others) < 5
    found = re.search(r"error of the first step's gradient: ([\d.e-]+)", out)
    assert found
    assert float(found[1]) < 1e-5


def test_an_encoders_images_are_dealt_in_a_loop_with_fsdp2(tmp_path: Path) -> None:
    for file in ("dealt_encoder.py", "tiny_vlm.py"):
        shutil.copy(HERE / file, tmp_path)
    out = run("dealt_encoder.sh", tmp_path)
    gains = [float(gain) for gain in re.findall(r"step \d: the encoder is ([\d.]+)x", out)]
    assert len(gains) == 4
    assert min(gains) > 1.2
    usual, dealt = ([float(x) for x in re.findall(r"\d+\.\d+", line)] for line in re.findall("norms, .*: (.*)", out))
    assert len(usual) == 8
    assert dealt == pytest.approx(usual, rel=1e-5)
