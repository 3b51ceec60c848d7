"""What the campaign is played on: the demo in small, made once and copied for every run.

Two processes of this machine, pictures and texts of the demo dataset, one of them missing and one cut short behind a
sound header. Everything else is as a user has it: profile, plan, train, compare, report, by `dflop train FILE`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop.data.demo import make_demo_dataset
from dflop.launch.kernels import kernel_environment

REPO = Path(__file__).parents[2]
NUM_HEALTHY, BATCH_SIZE, NUM_STEPS = 31, 8, 12
MISSING, CUT = "missing", "cut"
"""Ids of the two rows that are broken from the beginning: the header gives one away, decoding the other."""


class Stage:
    """A folder with dataset, configuration, store and runs of one run of the campaign."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.runs, self.data = folder, folder / "store", folder / "runs", folder / "data"
        self.media, self.annotations = self.data / "media", self.data / "annotations.jsonl"


def rows_of(annotations: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in annotations.read_text().splitlines() if line.startswith("{")]


def make_dataset(folder: Path) -> None:
    """Texts and small pictures of the demo dataset, and two broken rows."""
    whole, stage = folder / "whole", Stage(folder)
    make_demo_dataset(whole, 8 * NUM_HEALTHY)
    stage.media.mkdir(parents=True)
    small = [row for row in rows_of(whole / "annotations.jsonl") if _is_small(row, whole / "media")]
    pictures = [row for row in small if "image" in row][: NUM_HEALTHY * 3 // 4]
    kept = pictures + [row for row in small if "image" not in row][: NUM_HEALTHY - len(pictures)]
    assert len(kept) == NUM_HEALTHY, f"the demo dataset has {len(kept)} small rows"
    # Every row has a picture to itself: what happens to a file then happens to one sample.
    for number, row in enumerate(pictures):
        source = whole / "media" / row["image"]
        row["image"] = f"{number:02d}{source.suffix}"
        shutil.copyfile(source, stage.media / row["image"])
    largest = max(stage.media.glob("*.jpg"), key=lambda p: p.stat().st_size).read_bytes()
    (stage.media / f"{CUT}.jpg").write_bytes(largest[: len(largest) // 2])
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A picture."}]
    kept += [{"id": name, "image": f"{name}.jpg", "conversations": turns} for name in (MISSING, CUT)]
    stage.annotations.write_text("".join(json.dumps(row) + "\n" for row in kept))
    shutil.copyfile(whole / "tokenizer.json", stage.data / "tokenizer.json")
    shutil.rmtree(whole)


def _is_small(row: dict[str, Any], media: Path) -> bool:
    if "video" in row or "audio" in row or not isinstance(row.get("image", ""), str):
        return False
    text = "".join(turn["value"] for turn in row["conversations"])
    return len(text) < 2000 and ("image" not in row or (media / row["image"]).stat().st_size < 60_000)


def copy_stage(dataset: Path, folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> Stage:
    """The stage of one run, from a folder that `make_dataset` filled; `changes` are added to its configuration."""
    shutil.copytree(dataset / "data", folder / "data")
    shutil.copytree(REPO / "configs" / "models", folder / "models")
    stage = Stage(folder)
    media = {"media_root": str(stage.media), "tokenizer": str(stage.data / "tokenizer.json")}
    config: dict[str, Any] = {
        "name": "chaos",
        "model": "models/tiny_omni.yaml",
        "cluster": {"name": "here", "backend": "local", "num_processes_per_node": 2, "memory_per_process_gib": 3},
        "dataset": {"annotations": str(stage.annotations), **media},
        "store": str(stage.store),
        "runs": str(stage.runs),
        "data_profile": {"num_shards": 2, "max_bad_frac": 0.3},
        "model_profile": {"budget_s": 2, "num_repeats": 1, "num_probes": 4, "links_budget_s": 0.5},
        "plan": {"layouts": ["split"], "recompute": [False], "global_batch_size": BATCH_SIZE,
                 "microbatch_choices": [2], "num_scenarios": 2, "top": 2},
        "train": {"num_steps": NUM_STEPS, "learning_rate": 0.0001, "checkpoint_every": 2, "timeout_s": 60,
                  "stall_s": 15},
        "replan": {"mode": "off", "check_every_s": 1},
        "compare": {"num_batches": 1, "num_repeats": 1},
    }  # fmt: skip
    for section, values in changes.items():
        config[section] |= values
    (folder / "chaos.yaml").write_text(json.dumps(config, indent=1))
    return stage


def compile_kernels() -> None:
    """Into the cache that the jobs of runs read."""
    words = [sys.executable, "-c", "from dflop.schedule.warm import warm; warm()"]
    subprocess.run(words, cwd=REPO, env=os.environ | kernel_environment(os.environ), check=True)
