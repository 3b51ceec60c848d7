"""What people bring along: photos with captions and a model's folder, texts for a Trainer, a run of last night."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from ruamel.yaml import YAML

from dflop import resources
from dflop.config import load_config
from dflop.data.demo import make_demo_dataset
from dflop.data.demo_content import SPECIAL_TOKENS, train_tokenizer
from dflop.jobs.weights import MAX_SHARD_BYTES, first_weights, full_config
from dflop.launch import JobSpec
from dflop.models.weights import write_folder
from dflop.run.directory import family_of, tokenizer_of
from tests.data.containers import jsonl_of
from tests.data.helpers import chat
from tests.jobs.configs import write_sections
from tests.jobs.training import NARROW_OMNI

WORDS = ["a", "street", "in", "the", "rain", "with", "two", "bicycles", "and", "somebody", "who", "waits"]


def a_model_and_photos(folder: Path, num_rows: int = 640) -> None:
    """`model` with the config.json of Qwen2.5-VL-7B, and `photos` of many sizes with short and long captions."""
    rng = np.random.default_rng(0)
    sizes = YAML(typ="safe").load(resources.path("configs") / "models" / "qwen2_5_vl_7b.yaml")["hf_config"]
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(transformers.Qwen2_5_VLConfig(**sizes).to_dict()))
    media = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    train_tokenizer([" ".join(WORDS)], folder / "model" / "tokenizer.json", [*SPECIAL_TOKENS, *media])
    (folder / "photos").mkdir()
    rows = []
    for number, side in enumerate(np.clip(rng.lognormal(6.2, 0.6, num_rows), 64, 2000).astype(int)):
        Image.new("RGB", (int(side), int(side * 3 / 4))).save(folder / "photos" / f"{number}.jpg", quality=1)
        answer = " ".join(rng.choice(WORDS, int(np.clip(rng.lognormal(3.5, 1.0), 3, 1500))))
        rows.append(chat("<image>\nWhat is it?", answer, image=f"{number}.jpg"))
    jsonl_of(rows, folder / "photos" / "captions.jsonl")


def a_configuration_and_photos(folder: Path) -> None:
    """`my.yaml` over the demo's media, of a small model whose weights are in `base`."""
    make_demo_dataset(folder / "data", 48)
    file = write_sections(
        folder, "captions", NARROW_OMNI,
        model_profile={"budget_s": 5, "num_repeats": 1, "num_probes": 8},
        plan={"global_batch_size": 8, "microbatch_choices": [2], "num_scenarios": 2},
        train={"num_steps": 12, "checkpoint_every": 6, "learning_rate": 0.01},
        compare={"num_batches": 0},
    )  # fmt: skip
    given = load_config(file)
    tokenizer = tokenizer_of(given)
    family = family_of(given, tokenizer.vocab_size)
    first = first_weights(given, family, tokenizer)
    weights = {name: first.weights.read(name) for name, _ in first.model.named_parameters()}
    write_folder(family, full_config(family, tokenizer), weights, folder / "base", max_shard_bytes=MAX_SHARD_BYTES)
    of_base = (
        f"store={folder / '.dflop' / 'store'}",
        f"model.weights={folder / 'base'}",
        f"model.hf_config.text_config.vocab_size={tokenizer.vocab_size}",
    )
    (folder / "my.yaml").write_text(json.dumps(load_config(file, of_base).model_dump(mode="json")))


def texts(folder: Path, num_rows: int = 192) -> None:
    """`texts.jsonl`: token ids of texts with a tail."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.2, 0.9, num_rows), 4, 250).astype(int)
    jsonl_of([{"input_ids": rng.integers(1, 48, n).tolist()} for n in lengths], folder / "texts.jsonl")


def configuration_of_last_night(folder: Path) -> Path:
    """Of a run of two processes over the demo's data and two texts that are far longer than everything else."""
    make_demo_dataset(folder / "data", 48)
    with open(folder / "data" / "annotations.jsonl", "a") as rows:
        for name in ("server-log", "whole-book"):
            rows.write(json.dumps({"id": name, **chat("Sum it up.", " ".join(WORDS * 70))}) + "\n")
    config = {
        "name": "night",
        "model": str(NARROW_OMNI),
        "cluster": {"name": "here", "backend": "local", "num_processes_per_node": 2, "memory_per_process_gib": 3},
        "dataset": {
            "annotations": "data/annotations.jsonl", "media_root": "data/media", "tokenizer": "data/tokenizer.json",
        },
        "model_profile": {"budget_s": 5, "num_repeats": 1, "num_probes": 8},
        "plan": {"global_batch_size": 10, "microbatch_choices": [2], "num_scenarios": 2, "share_ranks": [True]},
        "train": {"num_steps": 20, "checkpoint_every": 50},
        "compare": {"num_batches": 0},
    }  # fmt: skip
    (folder / "night.yaml").write_text(json.dumps(config))
    return folder / "night.yaml"


def train_on_a_slow_machine(config: Path) -> None:
    """`dflop train CONFIG` whose second rank is slow."""
    from dflop.cli import app
    from dflop.steps import submit

    train_job = submit.train_job

    def slowed(*args: Any) -> JobSpec:
        return dataclasses.replace(train_job(*args), entry="tests.jobs.slowed:with_a_slow_rank")

    submit.train_job = slowed
    app(["train", str(config)])


if __name__ == "__main__":
    train_on_a_slow_machine(Path(sys.argv[1]))
