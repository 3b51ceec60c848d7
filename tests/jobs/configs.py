"""Small run configurations in a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflop.config import Config, load_config
from dflop.data.demo_content import train_tokenizer

MODELS = Path(__file__).parents[2] / "configs" / "models"
MINIMAL: dict[str, Any] = {
    "name": "small",
    "model": {"family": "qwen2_5_omni_thinker"},
    "cluster": {"name": "here", "num_processes_per_node": 4, "num_cores_per_node": 2, "memory_per_process_gib": 1},
    "dataset": {"annotations": "data/a.jsonl", "media_root": "data/media", "tokenizer": "data/tokenizer.json"},
}


def write_config(folder: Path, *overrides: str) -> Path:
    """A configuration file in `folder` whose store and runs lie there too."""
    content = {**MINIMAL, "store": str(folder / "store"), "runs": str(folder / "runs")}
    for name in ("annotations", "media_root", "tokenizer"):
        content["dataset"] = {**content["dataset"], name: str(folder / MINIMAL["dataset"][name])}
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    if overrides:
        path.write_text(json.dumps(load_config(path, overrides).model_dump(mode="json")))
    return path


def write_demo_config(folder: Path, num_samples: int, *overrides: str) -> Path:
    """A configuration file for a tiny model and a demo dataset that is made when it is needed."""
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    demo = folder / "demo"
    return write_config(
        folder, f"model={MODELS}/tiny_omni.yaml", "dataset.demo=true", f"dataset.demo_num_samples={num_samples}",
        f"dataset.annotations={demo}/annotations.jsonl", f"dataset.media_root={demo}/media",
        f"dataset.tokenizer={demo}/tokenizer.json", *overrides,
    )  # fmt: skip


def write_sections(folder: Path, name: str, model: Path, **sections: Any) -> Path:
    """`run.yaml` in a folder with a dataset in `data`: two processes of this machine, unless `cluster` says else.

    Sections are as a person writes them: what they leave out is a default.
    """
    names = {"annotations": "annotations.jsonl", "media_root": "media", "tokenizer": "tokenizer.json"}
    cluster = {"name": "here", "num_processes_per_node": 2, "memory_per_process_gib": 3, **sections.pop("cluster", {})}
    content = {
        "name": name, "model": str(model), "cluster": cluster, "store": str(folder / "store"),
        "runs": str(folder / "runs"), "dataset": {key: str(folder / "data" / file) for key, file in names.items()},
        **sections,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(content, indent=1))
    return folder / "run.yaml"


def make_config(folder: Path, *overrides: str) -> Config:
    return load_config(write_config(folder), overrides)


def make_dataset(folder: Path, annotations: str = '{"id": "a", "image": "x.jpg"}\n') -> None:
    """Files where the configuration expects them; their content is only looked at by preflight."""
    (folder / "data" / "media").mkdir(parents=True)
    (folder / "data" / "a.jsonl").write_text(annotations)
    train_tokenizer(["a picture of a cat\n"], folder / "data" / "tokenizer.json")
