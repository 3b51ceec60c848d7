"""Training works as a whole: real pictures, clips, sounds and texts, four processes, and a loss that goes to nothing.

A tiny Qwen2.5-Omni thinker with random weights learns its few samples by heart. Most it could learn blind, for how many
rows a picture has tells much; not all of the demo's, which stop at 0.07 when what encoders send is set to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dflop.data.dataset_profile import DatasetRef, profile_shard
from dflop.data.demo import make_demo_dataset
from dflop.data.sample_order import SampleOrder
from dflop.data.tokens import ChatTokenizer
from dflop.jobs.sample_source import DatasetSource
from dflop.models import load_family
from dflop.models.family import Family
from dflop.records import LLM, SampleShape
from dflop.train.loop import Hooks
from tests.models.whole_model import build_model
from tests.train.campaign import EpochPlans
from tests.train.rank import Rank, loop_settings
from tests.train.ranks import run_ranks
from tests.train.synthetic import HF_CONFIG, make_plan

LAYOUT = {"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}
SHORTEST = {"image": 31, "video": 12, "audio": 9, "text": 12}
"""How many samples of the demo are learned."""
BATCH_SIZE, NUM_MICROBATCHES, NUM_STEPS = 16, 3, 200
MAX_TOKENS, HIDDEN_SIZE = 400, 128
NEARLY_NOTHING = 0.03
WIDER = {
    "vision_config": {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": HIDDEN_SIZE},
    "audio_config": {"d_model": 64, "encoder_ffn_dim": 128, "output_dim": HIDDEN_SIZE},
    "text_config": {
        "hidden_size": HIDDEN_SIZE, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    },
}  # fmt: skip
CONFIG = HF_CONFIG | {section: HF_CONFIG[section] | wider for section, wider in WIDER.items()}
MEDIA = {
    "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12, "video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 4,
    "video_max_frames": 4, "audio_max_s": 4.0,
}  # fmt: skip

pytestmark = [pytest.mark.lane("layouts"), pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Lesson:
    """What is learned by heart; picklable."""

    dataset: DatasetRef
    shapes: tuple[SampleShape, ...]

    @property
    def family(self) -> Family:
        return family_of(self.dataset.tokenizer)

    def model(self) -> torch.nn.Module:
        ids = self.family.token_ids(ChatTokenizer(self.dataset.tokenizer, self.family).special_ids)
        return build_model(self.family, {**self.family.hf_config, **ids}, seed=0, dtype=torch.float32)


def family_of(tokenizer: Path) -> Family:
    rules = load_family("qwen2_5_omni_thinker", CONFIG, MEDIA)
    vocab_size = ChatTokenizer(tokenizer, rules).vocab_size
    config = {**CONFIG, "text_config": {**CONFIG["text_config"], "vocab_size": vocab_size}}
    return load_family("qwen2_5_omni_thinker", config, MEDIA)


class CachedSource(DatasetSource):
    """Files are decoded once and not in every epoch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.array = cache(super().array)


def train(rank, folder, lesson):
    """Loss of every step."""
    plan, losses = make_plan(LAYOUT, num_microbatches=NUM_MICROBATCHES, of=lesson.family), []
    it = Rank(rank, plan, lesson.family, lesson.model(), rate=3e-3)
    source = CachedSource(lesson.dataset, lesson.family, lesson.shapes)
    hooks = Hooks(lambda seen: losses.append(seen.loss), lambda *event: pytest.fail(f"{event}"))
    settings = loop_settings("overfit", NUM_STEPS, 3e-3, warmup_steps=20, checkpoint_every=NUM_STEPS)
    it.trainer(
        settings,
        source,
        EpochPlans(plan, lesson.shapes, SampleOrder(0, len(lesson.shapes), BATCH_SIZE)),
        hooks,
    ).run()
    return losses


def test_samples_of_the_demo_are_learned_by_heart(tmp_path):
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    folder = tmp_path / "data"
    tokenizer = make_demo_dataset(folder, 160).tokenizer
    dataset = DatasetRef.of_file(folder / "annotations.jsonl", folder / "media", tokenizer, MAX_TOKENS)
    shapes = sorted(profile_shard(dataset, family_of(tokenizer), 0, 1)[0], key=lambda s: s.num_llm_tokens)
    kinds = {kind: [s for s in shapes if (s.items[0].kind if s.items else "text") == kind] for kind in SHORTEST}
    lesson = Lesson(dataset, tuple(s for kind, number in SHORTEST.items() for s in kinds[kind][:number]))
    assert len(lesson.shapes) == 64
    losses, *others = run_ranks(train, sum(pp * dp for pp, dp in LAYOUT.values()), tmp_path, lesson)
    assert all(of_rank == losses for of_rank in others)
    knows_nothing = math.log(lesson.family.hf_config["text_config"]["vocab_size"])
    assert losses[0] == pytest.approx(knows_nothing, abs=0.5)
    last_epoch = losses[-math.ceil(len(lesson.shapes) / BATCH_SIZE) :]
    assert float(np.mean(last_epoch)) < NEARLY_NOTHING
