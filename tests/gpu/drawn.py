"""Samples drawn, not read, and settings of probes, for whoever measures models without data: sizes of photographs and
clips, lognormal texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflop.models.family import Family
from dflop.models.media import MediaHeader
from dflop.profile.groups import ProbeGroup, make_group
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import ProbeSettings
from dflop.records import MediaItem, SampleShape

ROOT = Path(__file__).parents[2]


def settings_of(name: str, model: Mapping[str, Any], device: torch.device) -> ProbeSettings:
    """How every probe of a model is told and repeated."""
    hardware, software = hardware_name(device.type), software_name()
    return ProbeSettings(name, hardware, software, model.get("dtype", "bfloat16"), num_repeats=5)


def token_config(family: Family) -> dict[str, int]:
    """Ids of a family's special tokens, as no tokenizer has them."""
    tokens = {t for m in family.media_tokens.values() for t in (m.begin, m.pad, m.end) if t} | {*family.special_tokens}
    return family.token_ids({t: i + 10 for i, t in enumerate(sorted(tokens))})


def make_shapes(family: Family, num_samples: int, seed: int) -> list[SampleShape]:
    """Samples with up to three media of the kinds the family takes, and lognormal texts."""
    rng, kinds = np.random.default_rng(seed), sorted(family.media_tokens)
    shapes = []
    for index in range(num_samples):
        num_items = int(rng.choice([0, 1, 2, 3], p=[0.15, 0.6, 0.15, 0.1]))
        items = tuple(_item(family, str(rng.choice(kinds)), num_items, rng) for _ in range(num_items))
        num_text = int(np.clip(rng.lognormal(5.3, 0.9), 16, 6000))
        length = num_text + sum(i.num_rows for i in items)
        shapes.append(SampleShape("drawn", index, str(index), num_text, max(1, num_text // 2), length, items))
    return shapes


def _item(family: Family, kind: str, num_images: int, rng: np.random.Generator) -> MediaItem:
    width, height = (int(x) for x in rng.lognormal(6.6, 0.4, 2).clip(200, 2400))
    num_frames = {"image": 1, "video": int(rng.integers(48, 900)), "audio": 0}[kind]
    duration_s = {"image": 0.0, "video": num_frames / 24, "audio": float(rng.uniform(1.0, 29.0))}[kind]
    return place(family, kind, width, height, num_frames, duration_s, num_images=num_images)


def random_groups(
    shapes: Sequence[SampleShape], module: str, num_groups: int, *, max_samples: int, seed: int
) -> tuple[ProbeGroup, ...]:
    """Microbatches as training makes them, of 1 to `max_samples` samples: small ones as often as large ones."""
    rng = np.random.default_rng([seed, len(shapes), 1])
    users = [s for s in shapes if s.load(module).num_tokens > 0]
    sizes = [int(np.exp(rng.uniform(0, np.log(max_samples + 1)))) for _ in range(num_groups)]
    return tuple(make_group("random", [users[i] for i in rng.choice(len(users), n)], module) for n in sizes)


def place(
    family: Family, kind: str, width_px: int, height_px: int, num_frames: int, duration_s: float, *,
    num_images: int, level: int = 0,
) -> MediaItem:  # fmt: skip
    """A media item as the family sees it."""
    header = MediaHeader(kind, width_px, height_px, num_frames, duration_s)
    return header.item("", family.place(header, num_images, level))
