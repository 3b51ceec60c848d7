"""Decoded media to encoder input arrays, as the Hugging Face processors make them (numpy, no torch).

Pixels stay bytes, a quarter of what floats take between processes and on the way to a GPU: the stage that takes them
rescales and normalises (`pixels.py`). `patchify` cuts them into patches in the merge-window order of Qwen2VL's image
processor, `cut_tiles` and `tile_pixels` are that of families that cut pictures into tiles; tests hold all of it equal
to the processors. `log_mel` is `WhisperFeatureExtractor` on the clip padded
with silence, which equals the family's "pad to 300 s, then drop the padding" at a fraction of the work.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

SAMPLE_RATE_HZ = 16_000
MEL_HOP_SAMPLES = 160
_MEL_TAIL_FRAMES = 4
"""Silent frames appended before the STFT so that the last real frame sees zeros, not a reflection of the clip."""


def mel_settings(audio: Mapping[str, Any]) -> dict[str, Any]:
    """What the settings of an audio processor say where it makes the mel frames of this file, given an audio config."""
    return {
        "feature_size": audio["num_mel_bins"],
        "sampling_rate": SAMPLE_RATE_HZ,
        "hop_length": MEL_HOP_SAMPLES,
        "n_fft": 400,
    }


def patchify(
    frames_THWC: np.ndarray,
    grid: tuple[int, int, int],
    *,
    patch_px: int,
    merge: int,
    temporal_patch: int,
) -> np.ndarray:
    """Patches of a clip in the order the vision tower expects.

    Args:
        frames_THWC: uint8, sides equal to the grid times `patch_px`; a single frame is repeated in time.
        grid: (temporal, height, width) patches.
        patch_px: Side of a patch.
        merge: Patches merged into one LLM row per axis.
        temporal_patch: Frames per temporal patch.

    Returns:
        uint8 `[t * h * w, 3 * temporal_patch * patch_px**2]`, colours slowest.

    Raises:
        ValueError: frame count or size does not match the grid.
    """
    grid_t, grid_h, grid_w = grid
    if len(frames_THWC) == 1:
        frames_THWC = np.repeat(frames_THWC, temporal_patch, axis=0)
    if frames_THWC.shape[:3] != (grid_t * temporal_patch, grid_h * patch_px, grid_w * patch_px):
        raise ValueError(f"frames {frames_THWC.shape} do not match grid {grid} of {patch_px} px patches")
    blocks = frames_THWC.reshape(
        grid_t, temporal_patch, grid_h // merge, merge, patch_px, grid_w // merge, merge, patch_px, 3
    )
    return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(grid_t * grid_h * grid_w, -1)


def pad_frame(frame_HWC: np.ndarray, size_px: tuple[int, int], fill: tuple[int, ...] = (0, 0, 0)) -> np.ndarray:
    """A frame in the middle of a larger one; of an odd margin, more is below and to the right.

    Args:
        frame_HWC: uint8.
        size_px: (height, width), at least the frame's.
        fill: Colour of what is added.
    """
    (height, width), (height_px, width_px) = frame_HWC.shape[:2], size_px
    top, left = (height_px - height) // 2, (width_px - width) // 2
    padded = np.empty((height_px, width_px, 3), np.uint8)
    padded[:] = fill
    padded[top : top + height, left : left + width] = frame_HWC
    return padded


def cut_tiles(frame_HWC: np.ndarray, tile_px: int) -> np.ndarray:
    """Tiles of a frame whose sides are multiples of `tile_px`, line by line: uint8 `[n, tile_px, tile_px, 3]`."""
    rows, columns = (side // tile_px for side in frame_HWC.shape[:2])
    tiles = frame_HWC.reshape(rows, tile_px, columns, tile_px, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(rows * columns, tile_px, tile_px, 3)


def tile_pixels(tiles_NHWC: np.ndarray) -> np.ndarray:
    """Tiles with their colours in front: uint8 `[n, 3, height, width]`."""
    return np.ascontiguousarray(tiles_NHWC.transpose(0, 3, 1, 2))


def log_mel(
    waveform: np.ndarray, *, num_frames: int, num_mel_bins: int, window_frames: int | None = None
) -> np.ndarray:
    """Log-mel frames of a mono 16 kHz clip.

    Args:
        waveform: float32 `[n]`; cut or padded with silence to `num_frames`, so that a header that is off by a few
            samples cannot change the number of rows the plan promised.
        num_frames: Frames of the clip.
        num_mel_bins: Rows of the result.
        window_frames: Frames of an encoder's fixed window, which silence fills up; None: there is none.

    Returns:
        float32 `[num_mel_bins, window_frames or num_frames]`.
    """
    length = window_frames or num_frames + _MEL_TAIL_FRAMES
    clip = np.zeros(length * MEL_HOP_SAMPLES, dtype=np.float32)
    kept = min(len(waveform), num_frames * MEL_HOP_SAMPLES)
    clip[:kept] = waveform[:kept]
    features = _extractor(num_mel_bins)(
        clip, sampling_rate=SAMPLE_RATE_HZ, padding=False, truncation=False, return_tensors="np"
    )
    mel: np.ndarray = features["input_features"][0][:, : window_frames or num_frames].astype(np.float32)
    return mel


@functools.cache
def _extractor(num_mel_bins: int) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=num_mel_bins, sampling_rate=SAMPLE_RATE_HZ)
