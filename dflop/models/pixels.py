"""Pixels of encoder inputs, from bytes to what a tower takes: rescaled to 0..1 and normalised by colour, on its device.

Nothing here imports torch: families name their colours, and the data profiler imports families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Colours:
    """Statistics of red, green and blue between 0 and 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What Hugging Face's processors make in float32, rounded once.

        Args:
            pixels: uint8 `[n, 3, height, width]`, or `[n, 3 * k]` with colours slowest.
            dtype: Of the result.
        """
        by_colour = pixels.reshape(len(pixels), len(self.mean), -1)
        found = by_colour.new_empty(by_colour.shape, dtype=dtype)
        for colour, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):  # a third of the floats at a time
            scale, shift = np.float32(1 / 255) / np.float32(std), np.float32(mean / std)
            found[:, colour] = by_colour[:, colour].float().mul_(float(scale)).sub_(float(shift))
        return found.view(pixels.shape)


CLIP = Colours((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""SigLIP's."""
