"""A tiny model of every family, samples with media for it, and the same samples as Hugging Face's own forward wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dflop.models import load_family
from dflop.models.build import IGNORE_LABEL
from dflop.models.family import Family
from dflop.models.hf_inputs import hf_inputs
from dflop.models.media import Layout, MediaHeader
from dflop.models.weights import hf_types
from dflop.records import MediaItem
from tests.models.whole_model import build_model

HIDDEN, VOCAB, FIRST_TEXT_ID = 48, 96, 16
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WINDOWED = TEXT | {
    "use_sliding_window": True, "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
VIT = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
NATIVE = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": HIDDEN,
    "patch_size": 14,
}  # fmt: skip
NATIVE_LIMITS = {
    "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12, "video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 8,
    "video_max_frames": 6,
}  # fmt: skip
LLAVA = {
    "tie_word_embeddings": False,
    "vision_config": {"image_size": 42, "patch_size": 14, "vision_use_head": False, **VIT},
    "image_grid_pinpoints": [[42 * r, 42 * c] for r in range(1, 4) for c in range(1, 4)],
    "vision_aspect_ratio": "anyres_max_4",
    "text_config": TEXT,
}

Media = tuple[str, int, int, int, float]
"""(kind, width, height, frames, seconds)."""
IMAGES: list[list[Media]] = [
    [("image", 70, 130, 1, 0.0)],
    [],
    [("image", 200, 60, 1, 0.0), ("image", 31, 33, 1, 0.0)],
    [("video", 90, 64, 7, 3.5), ("image", 64, 150, 1, 0.0)],
    [("video", 30, 75, 4, 4.0)],  # a patch is other than a second of Qwen2.5-VL's positions
]
AUDIO: list[list[Media]] = [
    [("audio", 0, 0, 0, 0.31)],
    [],
    [("audio", 0, 0, 0, 1.7), ("audio", 0, 0, 0, 0.053)],
    [("audio", 0, 0, 0, 0.6)],
]


@dataclass
class Sample:
    """Tokens and encoder inputs of one sample."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    items: list[MediaItem]
    arrays: list[torch.Tensor]
    item_positions: list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A tiny family."""

    name: str
    hf_config: Mapping[str, Any]
    media: Mapping[str, Any]
    samples: Sequence[Sequence[Media]]

    @cached_property
    def family(self) -> Family:
        return load_family(self.name, self.hf_config, self.media)

    @cached_property
    def token_id(self) -> dict[str, int]:
        tokens = self.family.media_tokens.values()
        names = dict.fromkeys(name for t in tokens for name in (t.pad, t.begin, t.end) if name)
        return {name: number for number, name in enumerate(names, start=1)}

    @property
    def full_config(self) -> dict[str, Any]:
        return {**self.hf_config, **self.family.token_ids(self.token_id)}

    def build(self) -> torch.nn.Module:
        """The model as every rank builds it, with all parameters away from where initialisation leaves them."""
        model = build_model(self.family, self.full_config, seed=0, dtype=torch.float32)
        for number, p in enumerate(model.parameters()):
            p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        return model

    def plain(self) -> torch.nn.Module:
        """The same weights with Hugging Face's own attention."""

        config, model_class = hf_types(self.family, self.full_config)
        plain = model_class._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        plain.load_state_dict(self.build().state_dict())
        return plain.train()

    def item(self, media: Media, *, num_images: int = 1, level: int = 0) -> tuple[MediaItem, Layout]:
        header = MediaHeader(*media)
        placed = self.family.place(header, num_images, level)
        return header.item("", placed), placed.layout

    def array(self, item: MediaItem, seed: object) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        return torch.from_numpy(rng.standard_normal(self.family.array_shape(item.module, item.grid), dtype=np.float32))

    def sample(self, number: int) -> Sample:
        rng = np.random.default_rng(number)
        num_images = sum(kind == "image" for kind, *_ in self.samples[number])
        ids, found = self._text(rng, 3), Sample(*(None,) * 2, [], [], [])
        for place, media in enumerate(self.samples[number]):
            item, layout = self.item(media, num_images=num_images)
            pads = []
            for part in layout:
                if isinstance(part, int):
                    pads += range(len(ids), len(ids) + part)
                    ids += [self.token_id[self.family.media_tokens[item.kind].pad]] * part
                else:
                    ids += [self.token_id[part]] if part in self.token_id else self._text(rng, 2)
            found.items.append(item)
            found.arrays.append(self.array(item, [number, place]))
            found.item_positions.append(torch.tensor(pads))
        ids += self._text(rng, 6 + number)
        found.input_ids = torch.tensor(ids)
        found.labels = torch.full_like(found.input_ids, IGNORE_LABEL)
        found.labels[-5:] = found.input_ids[-5:]
        return found

    def hf_inputs(self, sample: Sample) -> dict[str, Any]:
        return hf_inputs(self.family, sample.input_ids, sample.items, sample.arrays, sample.item_positions)

    @staticmethod
    def _text(rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(FIRST_TEXT_ID, VOCAB, count).tolist()


LLAMA_TEXT = TEXT | {"model_type": "llama"}
CASES = {
    "LLaVA-OneVision": Case("llava_onevision", LLAVA, {"video_frames": 4}, IMAGES),
    "LLaVA-OneVision with Llama": Case(
        "llava_onevision",
        LLAVA | {
            "text_config": LLAMA_TEXT | {"attention_bias": True, "mlp_bias": True}, "vision_feature_layer": [3, 1, -1],
            "vision_config": LLAVA["vision_config"] | {"num_hidden_layers": 4},
        },
        {}, IMAGES,
    ),
    "InternVL": Case(
        "internvl",
        {"vision_config": {"image_size": 28, "patch_size": 7, "attention_bias": True, **VIT}, "text_config": WINDOWED},
        {"max_tiles": 4, "video_frames": 3}, IMAGES,
    ),
    "InternVL with InternViT-6B": Case(
        "internvl",
        {
            "tie_word_embeddings": False, "text_config": LLAMA_TEXT, "vision_feature_layer": -3,
            "vision_config": {
                "image_size": [28, 28], "patch_size": [14, 14], "use_qk_norm": True, "norm_type": "rms_norm",
                "use_mean_pooling": False, **VIT, "num_hidden_layers": 3,
            },
        },
        {"max_tiles": 4, "video_frames": 3}, IMAGES,
    ),
    "Qwen2-VL": Case(
        "qwen2_vl",
        {
            "text_config": WINDOWED | {"rope_parameters": MROPE},
            "vision_config": {
                "depth": 3, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "hidden_size": HIDDEN, "patch_size": 14,
            },
        },
        NATIVE_LIMITS, IMAGES,
    ),
    "Qwen2.5-VL": Case(
        "qwen2_5_vl",
        {
            "text_config": WINDOWED | {"rope_parameters": MROPE},
            "vision_config": NATIVE | {"window_size": 56, "fullatt_block_indexes": [2], "tokens_per_second": 2},
        },
        NATIVE_LIMITS, IMAGES,
    ),
    "Qwen3-VL": Case(
        "qwen3_vl",
        {
            "text_config": TEXT | {"rope_parameters": MROPE, "head_dim": 24},
            "vision_config": NATIVE | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
        },
        NATIVE_LIMITS | {"video_max_pixels": 28 * 28 * 24}, IMAGES,
    ),
    "Qwen2-Audio": Case(
        "qwen2_audio",
        {
            "text_config": TEXT,
            "audio_config": {
                "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 40,
                "d_model": 32, "max_source_positions": 50,
            },
        },
        {}, AUDIO,
    ),
}  # fmt: skip
