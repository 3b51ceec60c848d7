"""What the campaign is played on: the demo in small, made once and copied for every run.

Two processes of this machine, pictures and texts of the demo dataset, one of them missing and one cut short behind a
sound header. Everything else is as a user has it: profile, plan, train, compare, report, by `dflop train FILE`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop.data.demo import make_demo_dataset

REPO = Path(__file__).parents[2]
NUM_HEALTHY, BATCH_SIZE, NUM_STEPS = 31, 8, 12
MISSING, CUT = "missing", "cut"
"""Ids of the two rows that are broken from the beginning: the header gives one away, decoding the other."""


def rows_of(annotations: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in annotations.read_text().splitlines() if line.startswith("{")]


def make_dataset(folder: Path) -> None:
    """The smallest pictures and texts of the demo dataset, and two broken rows."""
    whole, data = folder / "whole", folder / "data"
    make_demo_dataset(whole, 8 * NUM_HEALTHY)
    (data / "media").mkdir(parents=True)

    def size(row: dict[str, Any]) -> int:
        return len(json.dumps(row)) + ((whole / "media" / row["image"]).stat().st_size if "image" in row else 0)

    rows = [row for row in rows_of(whole / "annotations.jsonl") if not {"video", "audio"} & row.keys()]
    rows = sorted((row for row in rows if isinstance(row.get("image", ""), str)), key=size)
    pictures = [row for row in rows if "image" in row][: NUM_HEALTHY * 3 // 4]
    kept = pictures + [row for row in rows if "image" not in row][: NUM_HEALTHY - len(pictures)]
    assert len(kept) == NUM_HEALTHY
    # Every row has a picture to itself: what happens to a file then happens to one sample.
    for number, row in enumerate(pictures):
        source = whole / "media" / row["image"]
        row["image"] = f"{number:02d}{source.suffix}"
        shutil.copyfile(source, data / "media" / row["image"])
    largest = max((data / "media").glob("*.jpg"), key=lambda p: p.stat().st_size).read_bytes()
    (data / "media" / f"{CUT}.jpg").write_bytes(largest[: len(largest) // 2])
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A picture."}]
    kept += [{"id": name, "image": f"{name}.jpg", "conversations": turns} for name in (MISSING, CUT)]
    (data / "annotations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    shutil.copyfile(whole / "tokenizer.json", data / "tokenizer.json")
    shutil.rmtree(whole)


def copy_stage(dataset: Path, folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """The folder of one run, from one that `make_dataset` filled; `changes` are added to its configuration."""
    data = Path(shutil.copytree(dataset / "data", folder / "data"))
    config: dict[str, Any] = {
        "name": "chaos",
        "model": str(REPO / "configs" / "models" / "tiny_omni.yaml"),
        "cluster": {"name": "here", "backend": "local", "num_processes_per_node": 2, "memory_per_process_gib": 3},
        "dataset": {"annotations": str(data / "annotations.jsonl"), "media_root": str(data / "media"),
                    "tokenizer": str(data / "tokenizer.json")},
        "store": str(folder / "store"),
        "runs": str(folder / "runs"),
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
