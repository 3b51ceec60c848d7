"""What the campaign is played on: a small dataset, made once and copied for every run.

Two processes of this machine, pictures and texts, one picture missing and one cut short behind a sound header.
Everything else is as a user has it: profile, plan, train, compare, report, by `dflop train FILE`.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dflop.data.demo_content import train_tokenizer
from tests.jobs.configs import MODELS, write_sections

REPO = Path(__file__).parents[2]
NUM_HEALTHY, BATCH_SIZE, NUM_STEPS = 31, 8, 12
MISSING, CUT = "missing", "cut"
"""Ids of the two rows that are broken from the beginning: the header gives one away, decoding the other."""


def rows_of(annotations: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in annotations.read_text().splitlines() if line.startswith("{")]


def make_dataset(folder: Path) -> None:
    """Texts, three of four with a picture to itself, so that what happens to a file happens to one sample."""
    data, rows, rng = folder / "data", list[dict[str, Any]](), np.random.default_rng(0)
    (data / "media").mkdir(parents=True)
    for number, name in enumerate([*map(str, range(NUM_HEALTHY)), MISSING, CUT]):
        answer = "the cat sat on the mat and looked at the dog " * (1 + number % 7)
        turns = [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": answer}]
        rows.append({"id": name, "conversations": turns})
        if number % 4 or name in (MISSING, CUT):
            turns[0]["value"] = "<image>\nwhat is it?"
            rows[-1]["image"] = f"{name}.jpg"
            pixels = rng.integers(0, 255, (60 + 8 * (number % 9), 60 + 8 * (number % 5), 3), np.uint8)
            Image.fromarray(pixels).save(data / "media" / f"{name}.jpg")
    (data / "media" / f"{MISSING}.jpg").unlink()
    cut = data / "media" / f"{CUT}.jpg"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (data / "annotations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer([turn["value"] for row in rows for turn in row["conversations"]], data / "tokenizer.json")


def copy_stage(dataset: Path, folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """The folder of one run, from one that `make_dataset` filled; `changes` are added to its configuration."""
    shutil.copytree(dataset / "data", folder / "data")
    sections: dict[str, dict[str, Any]] = {
        "cluster": {},
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
        sections[section] |= values
    write_sections(folder, "chaos", MODELS / "tiny_omni.yaml", **sections)
