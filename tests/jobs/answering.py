"""Runs of a tiny model of every family that have a checkpoint, with the folder of a published model or without one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflop.config import Config, load_config
from dflop.data.demo_content import train_tokenizer
from dflop.jobs.weights import full_config
from dflop.records import LLM
from dflop.run import lifecycle
from dflop.run.directory import RunDir, family_of, tokenizer_of
from dflop.train.checkpoint import Checkpointer
from tests.jobs.configs import MINIMAL
from tests.models.test_whole_conversations import CASES as TEMPLATES
from tests.models.tiny_families import CASES
from tests.models.whole_model import build_model
from tests.train import synthetic
from tests.train.rank import Rank
from tests.train.synthetic import make_inline_plan

NUM_STEPS = 3
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TILE_28 = {
    "size": {"height": 28, "width": 28}, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip
TILE_42 = {"size": {"height": 42, "width": 42}, **HALF}
PIXELS = {"image": {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}, "patch_size": 14}}


class Subject(NamedTuple):
    """A family's tiny model, and the settings of its processor that mean the same as its media limits."""

    family: str
    hf_config: Mapping[str, Any]
    media: Mapping[str, Any]
    template: str
    """Of `TEMPLATES`, which also names the tokens that the processor asks for."""
    options: Mapping[str, Any]
    auto: str = "AutoModelForImageTextToText"


def _native(name: str, template: str, video: Mapping[str, Any]) -> Subject:
    case = CASES[name]
    images = PIXELS["image"] | (HALF if case.name == "qwen3_vl" else {})
    return Subject(case.name, case.hf_config, case.media, template, {"image": images, "video": video})


_FRAMES = {"size": {"shortest_edge": 784, "longest_edge": 6272}, "max_frames": 6, "fps": 2.0, "do_sample_frames": True}
SUBJECTS = {
    "Qwen2-VL": _native("Qwen2-VL", "pairs", {**_FRAMES, "patch_size": 14}),
    "Qwen2.5-VL": _native("Qwen2.5-VL", "pairs", {**_FRAMES, "patch_size": 14}),
    "Qwen3-VL": _native(
        "Qwen3-VL", "no pair", {**_FRAMES, "size": {"shortest_edge": 784, "longest_edge": 18816}, "patch_size": 14}
    ),
    "Qwen2.5-Omni": Subject(
        "qwen2_5_omni_thinker", synthetic.HF_CONFIG, {"min_pixels": 784, "max_pixels": 784 * 12}, "three kinds",
        PIXELS | {"video": {"fps": 2.0, "do_sample_frames": True, "patch_size": 14}, "audio": {"chunk_length": 300}},
    ),
    "InternVL": Subject(
        "internvl", CASES["InternVL"].hf_config, {"max_tiles": 4, "video_frames": 3}, "lines of frames",
        {"image": {**TILE_28, "max_patches": 4, "crop_to_patches": True},
         "video": {**TILE_28, "num_frames": 3, "do_sample_frames": True}, "whole": {"image_seq_length": 4}},
    ),
    "LLaVA-OneVision": Subject(
        "llava_onevision", CASES["LLaVA-OneVision"].hf_config, {"video_frames": 4}, "media first",
        {"image": {**TILE_42, "image_grid_pinpoints": CASES["LLaVA-OneVision"].hf_config["image_grid_pinpoints"]},
         "video": {**TILE_42, "num_frames": 4, "do_sample_frames": True},
         "whole": {"num_image_tokens": 9, "vision_feature_select_strategy": "full",
                   "vision_aspect_ratio": "anyres_max_4"}},
    ),
    "Qwen2-Audio": Subject(
        "qwen2_audio", CASES["Qwen2-Audio"].hf_config, {}, "audio in lines", {"feature_size": 16, "chunk_length": 1},
        "AutoModelForMultimodalLM",
    ),
}  # fmt: skip


def write_source(subject: Subject, folder: Path, ask: Any) -> None:
    """A model's folder without weights, its processor written by transformers."""
    template, named = TEMPLATES[subject.template].template, TEMPLATES[subject.template].named
    write_tokenizer(subject, folder)
    said = ask(
        subject.family, options=dict(subject.options), tokenizer=str(folder / "tokenizer.json"), named=named,
        save_to=str(folder),
    )  # fmt: skip
    assert said.get("error") is None
    begins = "{{ '<|im_start|>assistant \n' }}" if subject.template == "media first" else "<|im_start|>assistant\n"
    prompt = f"{{% if add_generation_prompt %}}{begins}{{% endif %}}"
    (folder / "chat_template.jinja").write_text(template + prompt)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "repetition_penalty": 1.0}))


def write_tokenizer(subject: Subject, folder: Path) -> None:
    """`tokenizer.json` with the tokens of the family."""
    folder.mkdir(parents=True)
    named = TEMPLATES[subject.template].named.values()
    tokens = dict.fromkeys(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named, "<|vision_start|>", "<|vision_end|>"]
    )
    train_tokenizer(["what is this? a cat sat\nuser assistant\n"] * 3, folder / "tokenizer.json", tuple(tokens))


def begin_run(subject: Subject, folder: Path, source: Path, template: str) -> RunDir:
    """A run as drivers begin it."""
    model = {"family": subject.family, "hf_config": dict(subject.hf_config), "media": dict(subject.media)}
    dataset = {**MINIMAL["dataset"], "tokenizer": str(source / "tokenizer.json"), "chat_template": template}
    content = {**MINIMAL, "model": model, "dataset": dataset, "store": f"{folder}/store", "runs": f"{folder}/runs"}
    (folder / "run.yaml").write_text(json.dumps(content))
    return lifecycle.begin(load_config(folder / "run.yaml"))[0]


def save_checkpoints(rank: int, _folder: Path, runs: Sequence[RunDir]) -> None:
    """In a group of one: what the training of each run would leave, random weights with a plan."""
    for run in runs:
        config: Config = run.config()
        tokenizer = tokenizer_of(config)
        family = family_of(config, tokenizer.vocab_size)
        model = build_model(family, full_config(family, tokenizer), seed=0, dtype=torch.float32)
        for number, p in enumerate(model.parameters()):
            p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        layers = {spec.module: spec.num_layers for spec in family.specs() if spec.module != LLM}
        plan = make_inline_plan(
            [layers | {LLM: family.configs[LLM]["num_hidden_layers"]}], dp=1, num_microbatches=1
        )  # fmt: skip
        run.write_plan(plan, [])
        it = Rank(rank, plan, family, model)
        saver = Checkpointer(run.checkpoints, it.stages, it.optimizer, it.groups, it.parts, keep=1)
        saver.save(NUM_STEPS, {})
        saver.close()


def forget(source: Path) -> None:
    """The folder that a run's model came from is gone."""
    shutil.rmtree(source)
