"""Training works as a whole: real pictures, clips, sounds and texts, four processes, and a loss that goes to nothing.

A tiny Qwen2.5-Omni thinker with random weights learns its few samples by heart. Most it could learn blind, for how many
rows a picture has tells much; not all of the demo's, which stop at 0.07 when what encoders send is set to zero.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dflop.data.demo import make_demo_dataset
from dflop.data.demo_text import train_tokenizer
from dflop.data.order import SampleOrder
from dflop.data.profile import DatasetRef, profile_shard
from dflop.data.tokens import ChatTokenizer
from dflop.jobs.source import DatasetSource
from dflop.models import load_trainable
from dflop.models.build import build_model
from dflop.models.family import TrainableFamily
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM, SampleShape
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.plans import PlanMessage
from dflop.train.stages import llm_stage_of, make_stages
from tests.data.conftest import shared_media  # noqa: F401, a fixture
from tests.train.ranks import run_ranks
from tests.train.synthetic import make_plan, make_step_plan

LAYOUT = {"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}
SHORTEST = {"image": 31, "video": 12, "audio": 9, "text": 12}
"""How many samples of the demo are learned."""
BATCH_SIZE, NUM_MICROBATCHES, NUM_STEPS = 16, 3, 200
MAX_TOKENS, HIDDEN_SIZE = 400, 128
NEARLY_NOTHING = 0.03
CONFIG = {
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "window_size": 112,
        "fullatt_block_indexes": [1], "out_hidden_size": HIDDEN_SIZE,
    },
    "audio_config": {
        "encoder_layers": 2, "d_model": 64, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "num_mel_bins": 128,
        "n_window": 20, "output_dim": HIDDEN_SIZE,
    },
    "text_config": {
        "hidden_size": HIDDEN_SIZE, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    },
}  # fmt: skip
MEDIA = {
    "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12, "video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 4,
    "video_max_frames": 4, "audio_max_s": 4.0,
}  # fmt: skip

pytestmark = [pytest.mark.lane("layouts"), pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Lesson:
    """What is learned by heart; picklable."""

    annotations: Path
    media: Path
    tokenizer: Path
    shapes: tuple[SampleShape, ...]

    @property
    def dataset(self) -> DatasetRef:
        return DatasetRef.of_file(self.annotations, self.media, self.tokenizer, MAX_TOKENS)

    @property
    def family(self) -> TrainableFamily:
        return family_of(self.tokenizer)

    def model(self) -> torch.nn.Module:
        ids = self.family.token_ids(ChatTokenizer(self.tokenizer, self.family).special_ids)
        return build_model(self.family, {**self.family.hf_config, **ids}, seed=0, dtype=torch.float32)


def family_of(tokenizer: Path) -> TrainableFamily:
    rules = load_trainable("qwen2_5_omni_thinker", CONFIG, MEDIA)
    vocab_size = ChatTokenizer(tokenizer, rules).vocab_size
    config = {**CONFIG, "text_config": {**CONFIG["text_config"], "vocab_size": vocab_size}}
    return load_trainable("qwen2_5_omni_thinker", config, MEDIA)


def shapes_of(annotations: Path, media: Path, tokenizer: Path) -> list[SampleShape]:
    dataset = DatasetRef.of_file(annotations, media, tokenizer, MAX_TOKENS)
    return profile_shard(dataset, family_of(tokenizer), 0, 1)[0]


def kind_of(shape: SampleShape) -> str:
    return shape.items[0].kind if shape.items else "text"


class CachedSource(DatasetSource):
    """Files are decoded once and not in every epoch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.array = cache(super().array)


class EpochPlans:
    def __init__(self, plan, shapes):
        self._plan, self._shapes, self._order = plan, shapes, SampleOrder(0, len(shapes), BATCH_SIZE)

    def get(self, step):
        batch = [self._shapes[i] for i in self._order.batch(step)]
        return PlanMessage(make_step_plan(self._plan, batch, step, text_only_slot=False), {})


def train(rank, folder, lesson):
    """Loss of every step."""
    family, plan = lesson.family, make_plan(LAYOUT, num_microbatches=NUM_MICROBATCHES, of=lesson.family)
    seat, groups = seat_of(plan, rank), make_groups(plan, rank, timeout_s=300)
    stages, sharded = make_stages(lesson.model(), family, seat, groups.tensor)
    source, losses = CachedSource(lesson.dataset, family, lesson.shapes), []
    settings = LoopSettings("overfit", 0, NUM_STEPS, 3e-3, 20, 1.0, NUM_STEPS)
    trainer = Trainer(
        settings=settings, plan=plan, seat=seat, stages=stages, groups=groups, sharded=sharded,
        engine=Engine(
            plan, seat, stages, groups, torch.device("cpu"), hidden_size=HIDDEN_SIZE, row_width=HIDDEN_SIZE
        ),
        feed=Feed(source, family, plan, seat, llm_stage_of(stages)), source=source,
        plans=EpochPlans(plan, lesson.shapes),
        optimizer=make_optimizer(plan, seat, stages, groups, sharded, OptimizerSettings(3e-3, 0.0)),
        hooks=Hooks(lambda seen: losses.append(seen.loss), lambda *event: pytest.fail(f"{event}")),
    )  # fmt: skip
    trainer.run()
    return losses


def learn(lesson: Lesson, folder: Path) -> list[float]:
    """Losses of all steps, after the first was seen to be that of a model that knows nothing."""
    losses, *others = run_ranks(train, sum(pp * dp for pp, dp in LAYOUT.values()), folder, lesson)
    assert all(of_rank == losses for of_rank in others)
    vocab_size = lesson.family.hf_config["text_config"]["vocab_size"]
    print(f"{len(lesson.shapes)} samples, ln {vocab_size} = {math.log(vocab_size):.2f}; loss, every 20th step:")
    print(" ".join(f"{loss:.3f}" for loss in losses[::20]), f"... {losses[-1]:.4f}")
    assert losses[0] == pytest.approx(math.log(vocab_size), abs=0.5)
    return losses


def last_epoch(losses: list[float], lesson: Lesson) -> float:
    return float(np.mean(losses[-math.ceil(len(lesson.shapes) / BATCH_SIZE) :]))


def test_samples_of_the_demo_are_learned_by_heart(tmp_path):
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    dataset = make_demo_dataset(tmp_path / "data", 160)
    files = tmp_path / "data" / "annotations.jsonl", tmp_path / "data" / "media", dataset.tokenizer
    shapes = sorted(shapes_of(*files), key=lambda s: s.num_llm_tokens)
    found = [s for kind, n in SHORTEST.items() for s in [s for s in shapes if kind_of(s) == kind][:n]]
    assert len(found) == 64
    lesson = Lesson(*files, tuple(found))
    assert last_epoch(learn(lesson, tmp_path), lesson) < NEARLY_NOTHING


def test_samples_with_real_media_are_learned_by_heart(shared_media, tmp_path):  # noqa: F811, the fixture
    """All that have one answer: some ask the same of one picture, and expect different things to be said."""
    annotations = shared_media / "llava_demo.jsonl"
    rows = [json.loads(line) for line in annotations.read_text().splitlines()]
    train_tokenizer((turn["value"] for row in rows for turn in row["conversations"]), tmp_path / "tokenizer.json")
    files = annotations, shared_media, tmp_path / "tokenizer.json"
    asked = [(str([row.get(k) for k in ("image", "video", "audio")]), row["conversations"][0]["value"]) for row in rows]
    num_asked = Counter(asked)
    found = [s for s in shapes_of(*files) if num_asked[asked[s.sample_index]] == 1]
    assert len(found) > 40
    lesson = Lesson(*files, tuple(found))
    assert last_epoch(learn(lesson, tmp_path), lesson) < NEARLY_NOTHING
