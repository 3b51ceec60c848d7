"""What a tower works out from the sizes of its items: positions, windows, boundaries of attention.

transformers' towers take these tensors as arguments, and make them where sizes lie if they are not given: on a GPU that
is a dozen small kernels per item and a wait for each. Here they are made on the host, which the feed does a step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Arguments = dict[str, Any]
"""Tensors on the host, and numbers."""


def _boundaries(name: str, longest: str, cu_seqlens: torch.Tensor) -> Arguments:
    return {name: cu_seqlens, longest: int((cu_seqlens[1:] - cu_seqlens[:-1]).max())}


def native(tower: Any, sizes: torch.Tensor) -> Arguments:
    """Of Qwen's vision towers; sizes are (temporal, height, width) in patches."""
    from transformers import vision_utils as hf

    found: Arguments = {"position_ids": hf.get_vision_position_ids(sizes, tower.spatial_merge_size)}
    found |= _boundaries("cu_seqlens", "max_seqlen", hf.get_vision_cu_seqlens(sizes))
    if hasattr(tower, "window_size"):
        found["window_index"], cu_windows = hf.get_vision_window_index(
            sizes, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        found |= _boundaries("cu_window_seqlens", "max_window_seqlen", cu_windows)
    if hasattr(tower, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = hf.get_vision_interpolation_indices_and_weights(
            sizes, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners,
            tower.config.spatial_merge_size,
        )  # fmt: skip
    return found


def native_parts(tower: Any, sizes: torch.Tensor, parts: Sequence[tuple[int, int, int]]) -> Arguments:
    """Of parts of items, where a tower of that kind attends over whole frames in every layer.

    Args:
        tower: Without windows.
        sizes: Of whole items, in patches.
        parts: (item, first patch, end) of each, within a frame.
    """
    starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)]).tolist()
    where = torch.cat([torch.arange(starts[item] + first, starts[item] + end) for item, first, end in parts])
    whole = native(tower, sizes)
    found = {name: x[where] for name, x in whole.items() if name not in ("cu_seqlens", "max_seqlen")}
    cu_seqlens = torch.tensor([0, *(end - first for _, first, end in parts)]).cumsum(0).to(torch.int32)
    return found | _boundaries("cu_seqlens", "max_seqlen", cu_seqlens)


def mel(tower: Any, sizes: torch.Tensor) -> Arguments:
    """Of Qwen2.5-Omni's audio tower, which convolves chunks of one length; the first number of a size counts frames."""
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hf

    frames, most = sizes[:, 0], 2 * tower.n_window
    lengths = [min(most, n - start) for n in frames.tolist() for start in range(0, n, most)]
    chunks = torch.tensor(lengths)
    return {
        "chunk_lengths": chunks,
        "chunks": lengths,
        "valid_indices": (valid := hf.get_valid_indices(chunks)),
        "num_tokens": len(valid),
        "pool_indices": hf.get_pool_indices(frames),
        **_boundaries("cu_seqlens", "max_seqlen", hf.get_audio_cu_seqlens(chunks)),
    }


def windows(tower: Any, sizes: torch.Tensor) -> Arguments:
    """Of Qwen2-Audio's tower; the first number of a size counts real frames of a window.

    Positions of the audio and of the padding behind it attend among themselves, which for the former is what Hugging
    Face's mask does; rows of padding are not handed on.
    """
    positions, num_rows = tower._get_feat_extract_output_lengths(sizes[:, 0])
    length = tower.max_source_positions
    segments = [n for kept in positions.tolist() for n in (kept, length - kept) if n]
    num_per_window = length // 2
    kept = [torch.arange(n) + window * num_per_window for window, n in enumerate(num_rows.tolist())]
    cu_seqlens = torch.tensor([0, *segments]).cumsum(0).to(torch.int32)
    return _boundaries("cu_seq_lens_q", "max_length_q", cu_seqlens) | {"kept": torch.cat(kept)}


ARITHMETIC: Mapping[str, Callable[[Any, torch.Tensor], Arguments]] = {"native": native, "mel": mel, "windows": windows}
"""By `Tower.call`; the other towers need none."""
