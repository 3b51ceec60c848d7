"""What `loss.py` takes of memory at once, known without torch: plans are charged by the numbers the engine goes by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHUNK_TOKENS = 4096
"""Whose logits exist at once. Fewer cost time: each chunk passes over the head's gradient once more."""
BLOCK_BYTES = 16 << 20
"""Bytes of float32 numbers that softmax works on at a time: they stay in the cache of a GPU, or of a CPU."""
PART_BYTES = 32 << 20
"""Bytes of a product of the head's gradient in half precision, before it is added up in float32."""


def loss_peak_bytes(
    num_tokens: npt.ArrayLike, num_rows: int, hidden_size: int, value_bytes: int, *, trains: bool
) -> npt.NDArray[np.float64]:
    """Most bytes that a microbatch's loss takes at a time, without the gradient of hidden states, which is kept.

    Args:
        num_tokens: Tokens that carry loss.
        num_rows: Of the head, on this rank.
        hidden_size: Their width.
        value_bytes: Of a weight.
        trains: Whether the head does.
    """
    chunk, num_params, is_half = np.minimum(num_tokens, CHUNK_TOKENS), num_rows * hidden_size, value_bytes < 4
    # On a CPU, half precision is promoted in a copy, that of a chunk's product when it is added to others'.
    block = (1 + is_half) * np.minimum(4 * num_rows * chunk, BLOCK_BYTES)
    copies = np.where(np.asarray(num_tokens) > CHUNK_TOKENS, 3, 1)
    part = trains * is_half * min(value_bytes * num_params, PART_BYTES) * copies
    logits = value_bytes * num_rows * chunk + np.maximum(block, part)
    selected = value_bytes * hidden_size * np.asarray(num_tokens, dtype=np.float64)
    found: npt.NDArray[np.float64] = selected + logits + trains * 4 * num_params
    return found
