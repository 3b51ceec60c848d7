"""Families that cut pictures into tiles, against their processor and model: what the tests of both need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dflop.models.media import MediaRules, Placement
from tests.models.placing import place_image

WIDTH = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
TEXT = {**WIDTH, "num_key_value_heads": 1, "vocab_size": 8}
"""A model one layer deep and eight numbers wide."""


def tokenizer(**tokens: str) -> Any:
    words = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=tokens)


class FrameStack:
    """Stands for the video processor, which needs torchvision: every frame becomes one tile."""

    def __init__(self, tile_px: int) -> None:
        self._tile_px = tile_px

    def __call__(self, videos: Any, **_: Any) -> dict[str, torch.Tensor]:
        return {"pixel_values_videos": torch.zeros(len(videos), len(videos[0]), 3, self._tile_px, self._tile_px)}


def pixel_sizes(tile_px: int) -> list[tuple[int, int]]:
    """Of pictures whose pixels go through processor and model."""
    near = [(tile_px + n, tile_px) for n in (-1, 0, 1)]
    return [(1, 1), *near, (300, 3), (2, 500), (200, 97), (168, 126), (333, 500), (640, 480)]


def placed_images(rules: MediaRules, sizes: Sequence[tuple[int, int]]) -> tuple[list[Placement], list[Image.Image]]:
    """Black pictures of one sample."""
    placed = [place_image(rules, *size, num_images=len(sizes)) for size in sizes]
    return placed, [Image.new("RGB", size) for size in sizes]


def assert_lengths(layer: torch.nn.Module, encode: Callable[[], Any], placed: Sequence[Placement]) -> Any:
    """What the tower's first layer attends over while `encode` runs is what was placed; returns the features."""
    seen: list[torch.Size] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:2]))
    with torch.no_grad():
        features = encode().pooler_output
    hook.remove()
    num_sequences, length = seen[0]
    assert num_sequences == sum(p.grid[0] for p in placed)
    assert num_sequences * length == sum(p.num_tokens for p in placed)
    assert num_sequences * length**2 == sum(p.sum_sq_tokens for p in placed)
    return features


def text_of(processor: Any, inputs: Any) -> str:
    return processor.tokenizer.decode(inputs["input_ids"][0], clean_up_tokenization_spaces=False).replace(" ", "")
