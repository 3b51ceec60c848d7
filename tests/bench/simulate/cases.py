"""Data, layouts and policies whose steps are predicted and run, and tokens and encoder inputs for made-up samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from dflop.models.build import IGNORE_LABEL
from dflop.models.family import Family
from dflop.records import LLM, MediaItem, Plan, SampleShape
from dflop.train.feed import TokenizedSample
from tests.bench.profile.cases import VOCAB_SIZE, tiny_llava, tiny_omni
from tests.train.synthetic import make_plan

MODELS: Mapping[str, Callable[[], tuple[Family, dict[str, int], tuple[str, ...]]]] = {
    "omni": tiny_omni,
    "llava": tiny_llava,
}
FIRST_TEXT_ID = 16
BATCH_SIZE = 12


@cache
def family_of(model: str) -> Family:
    return MODELS[model]()[0]


@cache
def token_id(model: str) -> dict[str, int]:
    """Ids of the special tokens, by name."""
    tokens = family_of(model).media_tokens.values()
    names = dict.fromkeys(name for t in tokens for name in (t.begin, t.pad, t.end) if name)
    return {name: number for number, name in enumerate(names, start=1)}


@dataclass(frozen=True)
class Data:
    """What samples look like; sizes and lengths are lognormal, as in real sets."""

    kinds: tuple[str, ...]
    """Of media, all equally likely; empty for text only."""
    num_items: tuple[int, ...] = (1,)
    """Media of a sample, all equally likely."""
    side_px: float = 180.0
    """Median."""
    text_tokens: float = 90.0
    """Median."""

    def shapes(self, family: Family, num_samples: int, seed: int) -> list[SampleShape]:
        rng = np.random.default_rng(seed)
        return [self._shape(family, index, rng) for index in range(num_samples)]

    def _shape(self, family: Family, index: int, rng: np.random.Generator) -> SampleShape:
        num_items = int(rng.choice(self.num_items)) if self.kinds else 0
        items = tuple(self._item(family, str(rng.choice(self.kinds)), num_items, rng) for _ in range(num_items))
        num_text = int(np.clip(rng.lognormal(np.log(self.text_tokens), 0.7), 16, 12 * self.text_tokens))
        return SampleShape(
            profile_key="bench", sample_index=index, sample_id=str(index), num_text_tokens=num_text,
            num_supervised_tokens=max(1, num_text // 2), items=items,
            num_llm_tokens=num_text + sum(i.num_rows for i in items),
        )  # fmt: skip

    def _item(self, family: Family, kind: str, num_items: int, rng: np.random.Generator) -> MediaItem:
        sides = (int(x) for x in rng.lognormal(np.log(self.side_px), 0.4, 2).clip(56, 500))
        width, height = sides if kind != "audio" else (0, 0)
        num_frames = {"image": 1, "video": int(rng.integers(10, 60)), "audio": 0}[kind]
        duration_s = {"image": 0.0, "video": num_frames / 10, "audio": float(rng.uniform(0.5, 10.0))}[kind]
        size = {"width_px": width, "height_px": height, "num_frames": num_frames, "duration_s": duration_s}
        placed = family.place(kind, **size, num_images=num_items)
        return MediaItem(
            kind=kind, path="", **size, module=placed.module, grid=placed.grid, num_tokens=placed.num_tokens,
            sum_sq_tokens=placed.sum_sq_tokens, num_rows=placed.num_rows,
        )  # fmt: skip


PHOTOS = Data(("image",), (0, 1, 1, 2))
TALK = Data(("audio",), (1, 1, 2))
CLIPS = Data(("image", "video"), (1, 2), side_px=220.0, text_tokens=40.0)
TEXT_AND_SOME_PHOTOS = Data(("image",), (0, 0, 1), text_tokens=260.0)
TEXT = Data((), text_tokens=280.0)
EVERYTHING = Data(("image", "video", "audio"), (0, 1, 2))


@dataclass(frozen=True)
class Case:
    """One plan with its data."""

    name: str
    model: str
    data: Data
    layout: Mapping[str, tuple[int, int]]
    """(pp, dp) per module; processes in this order."""
    num_microbatches: int
    policy: str

    @property
    def plan(self) -> Plan:
        return make_plan(dict(self.layout), num_microbatches=self.num_microbatches, of=family_of(self.model))

    def batches(self, count: int) -> list[list[SampleShape]]:
        shapes = self.data.shapes(family_of(self.model), count * BATCH_SIZE, seed=11)
        return [shapes[i * BATCH_SIZE : (i + 1) * BATCH_SIZE] for i in range(count)]


VISION_LLM = {"vision": (1, 1), LLM: (1, 1)}
LLM_PP2, LLM_DP2 = {LLM: (2, 1)}, {LLM: (1, 2)}
CASES = (
    Case("vision | llm, images", "omni", PHOTOS, VISION_LLM, 4, "arrival"),
    Case("vision | llm, images", "omni", PHOTOS, VISION_LLM, 4, "balanced"),
    Case("vision | llm, much video", "omni", CLIPS, VISION_LLM, 6, "balanced"),
    Case("vision | llm, long text", "omni", TEXT_AND_SOME_PHOTOS, VISION_LLM, 2, "balanced"),
    Case("audio | llm, speech", "omni", TALK, {"audio": (1, 1), LLM: (1, 1)}, 6, "arrival"),
    Case("llm pp 2, text", "omni", TEXT, LLM_PP2, 4, "arrival"),
    Case("llm pp 2, text", "omni", TEXT, LLM_PP2, 12, "balanced"),
    Case("llm dp 2, text", "omni", TEXT, LLM_DP2, 3, "balanced"),
    Case("vision | llm, tiles", "llava", PHOTOS, VISION_LLM, 4, "arrival"),
    Case("llm pp 2, text", "llava", TEXT, LLM_PP2, 6, "balanced"),
)
"""Two processes, a core each."""
CROWDED_CASES = (
    Case(
        "vision, audio | llm dp 2", "omni", EVERYTHING, {"vision": (1, 1), "audio": (1, 1), LLM: (1, 2)}, 3, "balanced"
    ),
    Case("vision dp 2 | llm pp 2", "omni", CLIPS, {"vision": (1, 2), LLM: (2, 1)}, 6, "balanced"),
    Case("llm pp 4, text", "llava", TEXT, {LLM: (4, 1)}, 8, "balanced"),
)
"""Four processes, two to a core."""


class MadeUpSource:
    """Tokens and encoder inputs that are a pure function of (sample, item)."""

    def __init__(self, model: str, shapes: Sequence[SampleShape]) -> None:
        self._family, self._ids = family_of(model), token_id(model)
        self._shapes = {s.sample_index: s for s in shapes}

    def shape(self, sample_index: int) -> SampleShape:
        return self._shapes[sample_index]

    def tokens(self, sample_index: int) -> TokenizedSample:
        shape, rng = self._shapes[sample_index], np.random.default_rng(sample_index)
        ids: list[int] = []
        positions = []
        for item in shape.items:
            pad = self._ids[self._family.media_tokens[item.kind].pad]
            for part in self._layout(shape, item):
                if isinstance(part, str):
                    ids.append(self._ids[part])
                else:
                    positions.append(len(ids) + np.arange(part))
                    ids += [pad] * part
        ids += rng.integers(FIRST_TEXT_ID, VOCAB_SIZE, shape.num_llm_tokens - len(ids)).tolist()
        labels = np.full(len(ids), IGNORE_LABEL)
        labels[-shape.num_supervised_tokens :] = ids[-shape.num_supervised_tokens :]
        return TokenizedSample(np.asarray(ids), labels, tuple(positions))

    def _layout(self, shape: SampleShape, item: MediaItem) -> tuple[str | int, ...]:
        return self._family.place(
            item.kind, width_px=item.width_px, height_px=item.height_px, num_frames=item.num_frames,
            duration_s=item.duration_s, num_images=len(shape.items),
        ).layout  # fmt: skip

    def array(self, sample_index: int, item: int) -> np.ndarray:
        media = self._shapes[sample_index].items[item]
        rng = np.random.default_rng([sample_index, item])
        return rng.standard_normal(self._family.array_shape(media.module, media.grid), dtype=np.float32)
