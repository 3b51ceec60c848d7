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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.data.demo import make_demo_dataset
from dflop.launch.kernels import kernel_environment

REPO = Path(__file__).parents[2]
NUM_HEALTHY, BATCH_SIZE, NUM_STEPS = 31, 8, 12
MISSING, CUT = "missing", "cut"
"""Ids of the two rows that are broken from the beginning: the header gives one away, decoding the other."""
_MAX_PICTURE_BYTES = 60_000


@dataclass(frozen=True)
class Stage:
    """A folder with dataset, configuration, store and runs of one run of the campaign."""

    folder: Path

    @property
    def config_file(self) -> Path:
        return self.folder / "chaos.yaml"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def media(self) -> Path:
        return self.data / "media"

    @property
    def annotations(self) -> Path:
        return self.data / "annotations.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the annotation file as it is now."""
        return [json.loads(line) for line in self.annotations.read_text().splitlines() if line.startswith("{")]


def make_dataset(folder: Path) -> None:
    """Texts and small pictures of the demo dataset, and two broken rows."""
    make_demo_dataset(folder / "whole", 8 * NUM_HEALTHY)
    whole, media = folder / "whole" / "media", folder / "data" / "media"
    rows = [json.loads(line) for line in (folder / "whole" / "annotations.jsonl").read_text().splitlines()]
    small = [row for row in rows if _is_small(row, whole)]
    pictures = [row for row in small if "image" in row][: NUM_HEALTHY * 3 // 4]
    kept = pictures + [row for row in small if "image" not in row][: NUM_HEALTHY - len(pictures)]
    if len(kept) != NUM_HEALTHY:
        raise ValueError(f"the demo dataset has {len(kept)} rows that are small enough, {NUM_HEALTHY} are wanted")
    # Every row has a picture of its own: what happens to a file then happens to one sample.
    for number, row in enumerate(pictures):
        source = whole / row["image"]
        row["image"] = f"{number:02d}{source.suffix}"
        media.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, media / row["image"])
    largest = max(media.glob("*.jpg"), key=lambda p: p.stat().st_size)
    (media / f"{CUT}.jpg").write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    for name in (MISSING, CUT):
        turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A picture."}]
        kept.append({"id": name, "image": f"{name}.jpg", "conversations": turns})
    (folder / "data" / "annotations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    shutil.copyfile(folder / "whole" / "tokenizer.json", folder / "data" / "tokenizer.json")
    shutil.rmtree(folder / "whole")


def _is_small(row: dict[str, Any], media: Path) -> bool:
    if "video" in row or "audio" in row or not isinstance(row.get("image", ""), str):
        return False
    text = "".join(turn["value"] for turn in row["conversations"])
    picture = media / row["image"] if "image" in row else None
    return len(text) < 2000 and (picture is None or picture.stat().st_size < _MAX_PICTURE_BYTES)


def write_config(stage: Stage, **changes: dict[str, Any]) -> None:
    """The configuration; `changes` are added to its sections."""
    config: dict[str, Any] = {
        "name": "chaos",
        "model": "models/tiny_omni.yaml",
        "cluster": {"name": "here", "backend": "local", "num_processes_per_node": 2, "memory_per_process_gib": 3},
        "dataset": {
            "annotations": str(stage.annotations),
            "media_root": str(stage.media),
            "tokenizer": str(stage.data / "tokenizer.json"),
        },
        "store": str(stage.store),
        "runs": str(stage.runs),
        "data_profile": {"num_shards": 2, "max_bad_frac": 0.3},
        "model_profile": {"budget_s": 2, "num_repeats": 1, "num_probes": 4, "links_budget_s": 0.5},
        "plan": {
            "layouts": ["split"],
            "recompute": [False],
            "global_batch_size": BATCH_SIZE,
            "microbatch_choices": [2],
            "num_scenarios": 2,
            "top": 2,
        },
        "train": {
            "num_steps": NUM_STEPS,
            "learning_rate": 0.0001,
            "checkpoint_every": 2,
            "timeout_s": 60,
            "stall_s": 15,
        },
        "replan": {"mode": "off", "check_every_s": 1},
        "compare": {"num_batches": 1, "num_repeats": 1},
    }
    for section, values in changes.items():
        config[section] = {**config[section], **values}
    shutil.copytree(REPO / "configs" / "models", stage.folder / "models", dirs_exist_ok=True)
    stage.config_file.write_text(json.dumps(config, indent=1))


def compile_kernels() -> None:
    """Into the cache that the jobs of runs read."""
    environment = os.environ | kernel_environment(os.environ)
    words = [sys.executable, "-c", "from dflop.schedule.warm import warm; warm()"]
    subprocess.run(words, cwd=REPO, env=environment, check=True)


def copy_stage(dataset: Path, folder: Path, **changes: dict[str, Any]) -> Stage:
    """A stage of its own for one run.

    Args:
        dataset: Folder that `make_dataset` filled.
        folder: Of the run; must not exist.
        changes: For `write_config`.
    """
    shutil.copytree(dataset / "data", folder / "data", copy_function=shutil.copy2)
    stage = Stage(folder)
    write_config(stage, **changes)
    return stage
