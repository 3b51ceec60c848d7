"""How each kind of encoder is called: a packed group of items in, rows for the LLM out.

Towers, projectors and the arithmetic between them are Hugging Face's; what stands here is which of its functions a
family needs, and how rows of several items are put one after the other. `ENCODERS` names them for `Tower.call`, and
`PACKERS` what makes an item's rows of the features of all its tiles, where features are not rows already.

`ARITHMETIC` is what a tower works out from the sizes of its items: positions, windows, boundaries of attention.
transformers' towers take these tensors as arguments, and make them where sizes lie if they are not given: on a GPU that
is a dozen small kernels per item and a wait for each. Here they are made on the host, which the feed does a step ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dflop.models.family import GENERIC, GENERIC_PARTS
from dflop.models.generic import items

Arguments = dict[str, Any]
"""Tensors on the host, and numbers."""
Encoder = Callable[[Any, Any, torch.Tensor, torch.Tensor, Arguments], torch.Tensor]
"""(model without its LLM, tower, data, sizes `[items, n]` on the host, what `ARITHMETIC` makes of these, on the device)
-> `[features, width]` in item order: rows, where nothing packs them."""
Packer = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model without its LLM, features of all items, sizes on the host) -> `[rows, width]` in item order."""


def native(shell: Any, tower: Any, data: torch.Tensor, sizes: torch.Tensor, made: Arguments) -> torch.Tensor:
    """Native-resolution vision: patches of all items, sizes (temporal, height, width) in patches.

    Deepstack features, where the tower has them, stand beside a row: `[rows, (1 + features) * hidden]`.
    """
    out = tower(hidden_states=data, **{"grid_thw": sizes, **made})
    rows: torch.Tensor = out.pooler_output
    mergers = getattr(tower, "deepstack_merger_list", ())
    if not len(mergers):
        return rows
    features = list(out.deepstack_features)
    # A tower cut for a probe names its last layer several times and runs a merger once; the others cost as much.
    features += [merger(out.last_hidden_state) for merger in mergers[len(features) :]]
    return torch.cat([rows, *features], dim=1)


def mel(shell: Any, tower: Any, data: torch.Tensor, sizes: torch.Tensor, made: Arguments) -> torch.Tensor:
    """Audio of any length, mel frames of all items side by side; the first number of a size counts them."""
    chunks = data.T.split(made.pop("chunks"))
    padded = nn.utils.rnn.pad_sequence(list(chunks), batch_first=True).transpose(1, 2)
    out = tower(input_features=data, feature_lens=sizes[:, 0], padded_feature=padded, **made)
    rows: torch.Tensor = out.last_hidden_state
    return rows


def windows(shell: Any, tower: Any, data: torch.Tensor, sizes: torch.Tensor, made: Arguments) -> torch.Tensor:
    """Audio in windows of fixed length, `[items, mel bins, frames]`; the first number of a size counts real frames."""
    kept = made.pop("kept")
    hidden = tower(input_features=data, **made).last_hidden_state
    rows: torch.Tensor = shell.multi_modal_projector(hidden.flatten(0, 1).index_select(0, kept))
    return rows


def anyres(shell: Any, tower: Any, data: torch.Tensor, sizes: torch.Tensor, made: Arguments) -> torch.Tensor:
    """Tiles of one size, a feature per patch.

    The tower sees all of them at once, each as if it were one of several images, for which Hugging Face does nothing
    but append a newline.
    """
    single = torch.ones(len(data), 2, dtype=torch.long)
    packed = shell.get_image_features(pixel_values=data, image_sizes=single, batch_num_images=[len(data) + 1])
    return torch.cat([tile[:-1] for tile in packed.pooler_output])


def packed_anyres(shell: Any, features: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows that keep the picture's shape: padding removed and newlines set per image, videos pooled.

    Sizes are those of `LlavaOnevision.item_size`.
    """
    rows, newline, per_item = [], shell.image_newline, sizes.tolist()
    tiles = features.unflatten(0, (sum(size[0] for size in per_item), -1))
    for item, (_, height, width, *fitted) in zip(tiles.split([size[0] for size in per_item]), per_item, strict=True):
        if not height:
            rows += [pooled(item), newline[None]]
            continue
        # The planned resolution is the only one on offer: limits may have taken others away.
        shell.config.image_grid_pinpoints = [fitted]
        (image,), _ = shell.pack_image_features(
            [item], [(height, width)], image_newline=newline, vision_aspect_ratio=shell.config.vision_aspect_ratio
        )
        rows.append(image)
    return torch.cat(rows)


def generic(shell: Any, tower: Any, data: torch.Tensor, sizes: torch.Tensor, made: Arguments) -> torch.Tensor:
    """Any tower, by its class's own `get_image_features`; sizes are those of `items.features`.

    Parts of items come with arithmetic of their own, which a tower of native resolution takes.
    """
    return native(shell, tower, data, sizes, made) if made else items.features(shell, data, sizes)


def pooled(frames: torch.Tensor) -> torch.Tensor:
    """Rows of square frames `[frames, rows, width]` at half their height and width, `[frames * fewer rows, width]`.

    As `apply_pooling` of LLaVA-OneVision, which lays channels out first: CUDA's kernel for that layout has one thread
    per pixel, which walks over all channels, and took 1.5 ms a frame on an H200.
    """
    side = math.isqrt(frames.shape[1])
    image = frames.unflatten(1, (side, side)).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    half = (-(-side // 2), -(-side // 2))
    return nn.functional.interpolate(image, size=half, mode="bilinear").permute(0, 2, 3, 1).flatten(0, 2)


ENCODERS: Mapping[str, Encoder] = {
    "native": native, "mel": mel, "windows": windows, "tiles": generic, "anyres": anyres, GENERIC: generic,
    GENERIC_PARTS: lambda shell, _tower, data, sizes, _made: items.features_of_parts(shell, data, sizes),
}  # fmt: skip
PACKERS: Mapping[str, Packer] = {"anyres": packed_anyres}
CUT_THEMSELVES = {"native", "mel", GENERIC}
"""Encoders whose attention splits a packed sequence at its segments unless told otherwise."""


def _boundaries(name: str, longest: str, cu_seqlens: torch.Tensor) -> Arguments:
    return {name: cu_seqlens, longest: int((cu_seqlens[1:] - cu_seqlens[:-1]).max())}


def native_arithmetic(tower: Any, sizes: torch.Tensor) -> Arguments:
    """Arguments of Qwen's vision towers; sizes are (temporal, height, width) in patches."""
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
    """Arguments for parts of items, where a tower of that kind attends over whole frames in every layer.

    Args:
        tower: Without windows.
        sizes: Of whole items, in patches.
        parts: (item, first patch, end) of each, within a frame.
    """
    starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)]).tolist()
    where = torch.cat([torch.arange(starts[item] + first, starts[item] + end) for item, first, end in parts])
    whole = native_arithmetic(tower, sizes)
    found = {name: x[where] for name, x in whole.items() if name not in ("cu_seqlens", "max_seqlen")}
    cu_seqlens = torch.tensor([0, *(end - first for _, first, end in parts)]).cumsum(0).to(torch.int32)
    found["grid_thw"] = sizes[[item for item, _, _ in parts]]  # GLM looks a segment's up
    return found | _boundaries("cu_seqlens", "max_seqlen", cu_seqlens)


def mel_arithmetic(tower: Any, sizes: torch.Tensor) -> Arguments:
    """Arguments of Qwen2.5-Omni's audio tower, which convolves chunks of one length; a size begins with its frames."""
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


def windows_arithmetic(tower: Any, sizes: torch.Tensor) -> Arguments:
    """Arguments of Qwen2-Audio's tower; the first number of a size counts real frames of a window.

    Positions of the audio and of the padding after it attend among themselves, which for the former is what Hugging
    Face's mask does; rows of padding are not handed on.
    """
    positions, num_rows = tower._get_feat_extract_output_lengths(sizes[:, 0])
    length = tower.max_source_positions
    segments = [n for kept in positions.tolist() for n in (kept, length - kept) if n]
    num_per_window = length // 2
    kept = [torch.arange(n) + window * num_per_window for window, n in enumerate(num_rows.tolist())]
    cu_seqlens = torch.tensor([0, *segments]).cumsum(0).to(torch.int32)
    return _boundaries("cu_seq_lens_q", "max_length_q", cu_seqlens) | {"kept": torch.cat(kept)}


ARITHMETIC: Mapping[str, Callable[[Any, torch.Tensor], Arguments]] = {
    "native": native_arithmetic, "mel": mel_arithmetic, "windows": windows_arithmetic,
}  # fmt: skip
"""By `Tower.call`; the other towers need none."""
