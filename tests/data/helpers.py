"""A family small enough to check by hand, and one-line rows."""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflop.data.annotations import AnnotatedSample
from dflop.data.conversation import read_row
from dflop.data.dataset_profile import DatasetRef
from dflop.data.demo_content import train_tokenizer
from dflop.data.tokens import ChatTokenizer, EncodedSample
from dflop.models.family import Family
from dflop.models.media import Layout, MediaHeader, MediaTokens, Placement
from dflop.records import ModuleSpec

WriteRows = Callable[..., DatasetRef]


class TinyFamily(Family):
    """One row per 28 x 28 px of image or frame pair, 25 rows per second of audio."""

    name = "tiny"
    modules = ("vision", "audio", "llm")
    media_tokens = {
        "image": MediaTokens("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
        "video": MediaTokens("<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"),
        "audio": MediaTokens("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    }

    def specs(self) -> tuple[ModuleSpec, ...]:
        return ()

    media_defaults = {"fps": 2.0, "max_px": 100_000}
    shrinkable = {"max_px": 28}

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        wrap = self.media_tokens[header.kind].wrap
        if header.kind == "audio":
            rows = math.ceil(header.duration_s * 25)
            return Placement("audio", (rows * 2, 0, 0), rows * 2, (rows * 2) ** 2, rows, wrap(rows))
        if min(header.width_px, header.height_px) < 2:
            raise ValueError(f"{header.width_px} x {header.height_px} px is smaller than a patch")
        side = self.limits(level)["max_px"]
        across, down = math.ceil(min(header.width_px, side) / 28), math.ceil(min(header.height_px, side) / 28)
        frames = () if header.kind == "image" else self.frame_indices(header.num_frames, header.duration_s)
        times = max(1, math.ceil(len(frames) / 2))
        tokens = times * across * down
        return Placement(
            "vision", (times, down, across), tokens * 4, times * (across * down * 4) ** 2, tokens, wrap(tokens)
        )

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        count = min(num_frames, max(1, math.ceil(duration_s * self.media["fps"])))
        return tuple(int(i) for i in np.linspace(0, num_frames - 1, count))

    def _never(self, *_: Any) -> Any:
        raise AssertionError("the data room never asks for this")

    array_of = array_shape = token_ids = shallow = _never


def chat(*texts: str, **row: object) -> dict[str, object]:
    """A row whose turns alternate between human and gpt."""
    said = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"conversations": said, **row}


def make_tokenizer(folder: Path) -> Path:
    """A small tokenizer with the special tokens of Qwen2.5-Omni."""
    path = folder / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and looked at the dog user assistant system\n"] * 3, path)
    return path


def encode(tokenizer: ChatTokenizer, sample: AnnotatedSample, layouts: Sequence[Layout] = ()) -> EncodedSample:
    (found,) = tokenizer.encode([sample], [layouts])
    return found


def parse_row(row: dict[str, Any], index: int, ignored_keys: Collection[str] = ()) -> AnnotatedSample:
    """A row of no file, interpreted."""
    return read_row(row, index, "", ignored_keys).sample


def sample_of(*texts: str, **row: object) -> AnnotatedSample:
    """`chat`, parsed."""
    return parse_row(chat(*texts, **row), 0)
