"""A reader for decode workers, which import it: no torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from dflop.records import MediaItem
from dflop.train.decode_worker import MediaError


@dataclasses.dataclass(frozen=True)
class NoiseReader:
    """Noise for every item; one sample is broken."""

    shape_of: Mapping[tuple[int, int, int], tuple[int, ...]]
    """Of the array of an item, by its grid."""
    broken: int

    def __call__(self, sample_index: int, media: MediaItem, level: int) -> np.ndarray:
        if sample_index == self.broken:
            raise MediaError("file is truncated")
        rng = np.random.default_rng([sample_index, media.width_px, media.height_px])
        return rng.standard_normal(self.shape_of[media.grid], dtype=np.float32)
