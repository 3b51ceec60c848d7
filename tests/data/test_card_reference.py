"""Rows per split of a folder equal those that Hugging Face's datasets find in it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflop.data.card import layout_of, read_card
from tests.data.layouts import pictures, rows, save_to_disk, shards, write_json

DATASETS = Path(sys.prefix) / "clients" / "datasets"
ROW = {"prompt": "What?", "completion": "That."}
FILES = {
    "names": ["a/train.jsonl 3", "a/test.jsonl 8", "a/dev.jsonl 2"],
    "words between signs": ["a-training_set.jsonl 3", "b.eval.v2.jsonl 1", "x_valid 1.jsonl 2", "contest.jsonl 9"],
    "folders": ["train/x.jsonl 3", "testing/x.jsonl 1", "evaluation-2/x.jsonl 1", "val/deep/x.jsonl 4"],
    "shards": ["data/train-00000-of-00002.parquet 3", "data/train-00001-of-00002.parquet 2",
               "data/test-00000-of-00001.parquet 1"],
    "splits of other names": ["data/train-00000-of-00001.parquet 3", "data/testmini-00000-of-00001.parquet 2"],
    "packed shards": ["part-0.jsonl.gz 5", "part-1.jsonl.gz 5", "part-2.jsonl.gz 4"],
    "lists": ["train.json 3", "validation.json 2"],
    "csv": ["train.csv 3", "test.csv 2"],
    "tsv": ["train.tsv 3", "dev.tsv 2"],
}  # fmt: skip


def make(folder: Path) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Folders in many layouts, and how they are loaded; None: from disk."""
    ways: dict[str, tuple[str, dict[str, Any] | None]] = {}
    for name, files in FILES.items():
        for file in files:
            path, _, number = file.rpartition(" ")
            rows(folder / name / path, int(number))
        ways[name] = (str(folder / name), {})
    (folder / "lines named json").mkdir()
    lines = "".join(json.dumps(ROW) + "\n" for _ in range(3))
    for split in ("train", "test"):
        (folder / "lines named json" / f"{split}.json").write_text(lines)
    save_to_disk(folder / "saved", {"train": 4, "test": 2})
    for split, number in (("train", 3), ("test", 2)):
        names = [f"{split}/{n}.jpg" for n in range(number)]
        pictures(folder / "imagefolder", *names)
        pictures(folder / "classes", *(f"{split}/{kind}/{n}.jpg" for n in range(number) for kind in ("cat", "dog")))
        text = "".join(f'{n}.jpg,"of {n},\nin two lines"\n' for n in range(number))
        (folder / "imagefolder" / split / "metadata.csv").write_text(f"file_name,text\n{text}")
        names = [f"lines of metadata/{split}/{n}.jpg" for n in range(number)]
        pictures(folder, *names)
        lines = "".join(json.dumps({"file_name": f"{n}.jpg", "caption": "It."}) + "\n" for n in range(number))
        (folder / "lines of metadata" / split / "metadata.jsonl").write_text(lines)
        (folder / "tars" / split).mkdir(parents=True)
        shards(folder / "tars" / split, number)
    of_splits = {"train": [ROW] * 3, "test": [ROW] * 2}
    path = write_json(folder / "json of splits" / "rows.json", of_splits)
    ways |= {name: (str(folder / name), {}) for name in
             ("lines named json", "imagefolder", "classes", "lines of metadata", "tars")}  # fmt: skip
    ways |= {
        f"json of splits, {split}": ("json", {"data_files": {split: str(path)}, "field": split}) for split in of_splits
    }
    return {**ways, "saved": (str(folder / "saved"), None)}


def counted(folder: Path) -> dict[str, int]:
    try:
        card = read_card(folder)
        parts = (*card.taken, *card.left)
    except Exception:  # media without text are refused, and counted all the same
        parts = layout_of(folder).parts
    found = Counter[str]()
    for part in parts:
        found[part.split or "train"] += part.num_rows or 0
    return dict(found)


@pytest.mark.skipif(not DATASETS.is_dir(), reason=f"{DATASETS} is not there (make references)")
def test_rows_per_split_are_those_of_datasets(tmp_path):
    ways = make(tmp_path / "of")
    env = {**os.environ, "PYTHONPATH": str(DATASETS), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    script = Path(__file__).with_name("datasets_reference.py")
    done = subprocess.run([sys.executable, script, json.dumps(ways)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    theirs: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    ours = {name: counted(tmp_path / "of" / name) for name in theirs if not name.startswith("json of splits")}
    of_splits = counted(tmp_path / "of" / "json of splits")
    ours |= {f"json of splits, {split}": {split: number} for split, number in of_splits.items()}
    # It drops what no split takes, and this card lists it as left.
    assert ours.pop("words between signs") == {**theirs.pop("words between signs"), "train": 3 + 9}
    assert ours == theirs
