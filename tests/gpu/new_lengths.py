"""Attention on lengths that were not seen before, as every microbatch of real data has: a part of `evidence`.

Some kernels are planned for a shape when it first comes, which takes the host longer than the device computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from dflop.models import attention
from tests.gpu.layers import HEADS
from tests.gpu.subject import Subject

NUM_SEGMENTS = 12
Kernel = Callable[..., torch.Tensor]


def new_lengths(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Seconds of forward and backward at first sight of 12 lengths, and the third time; distance from SDPA's values."""
    device, dtype = subject.device, torch.bfloat16 if subject.device.type == "cuda" else torch.float32
    for name, (num_heads, num_kv_heads, head_dim, causal) in HEADS.items():
        for way, kernel in KERNELS.items():
            first_s, again_s, errors, tokens = [], [], [0.0], 0
            row: dict[str, Any] = {"heads": name, "kernel": way}
            try:
                for seed in range(subject.size(12, 2)):
                    drawn = torch.Generator().manual_seed(seed)
                    lengths = torch.randint(20, subject.size(2000, 60), (NUM_SEGMENTS,), generator=drawn).tolist()
                    tensors = [
                        torch.randn(1, h, sum(lengths), head_dim, device=device, dtype=dtype, requires_grad=True)
                        for h in (num_heads, num_kv_heads, num_kv_heads)
                    ]
                    tokens += sum(lengths)
                    times, out = timed(subject, partial(kernel, *tensors, lengths, causal))
                    first_s.append(times[0])
                    again_s.append(times[-1])
                    exact = packed(attention.SDPA)(*tensors, lengths, causal)
                    errors.append(float((exact.detach().float() - out.float()).abs().max()))
                row |= {
                    "tokens": tokens, "first_s": first_s, "again_s": again_s, "max_error": max(errors),
                }  # fmt: skip
            except Exception as error:  # the other kernels are worth as much
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            yield row
            if time.monotonic() > deadline_s:
                return


def timed(subject: Subject, forward: Callable[[], torch.Tensor]) -> tuple[list[float], torch.Tensor]:
    """Seconds of forward and backward passes, the host's part included, and what the last one made."""
    times = []
    for _ in range(3):
        started_s = now_s(subject)
        out = forward()
        out.backward(torch.ones_like(out))
        times.append(now_s(subject) - started_s)
    return times, out.detach()


def now_s(subject: Subject) -> float:
    """When the device has done all."""
    if subject.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def packed(kernel: str) -> Kernel:
    """One of the kernels that training may use."""

    def forward(q: Any, k: Any, v: Any, lengths: Sequence[int], causal: bool) -> torch.Tensor:
        return attention.packed_attention(
            torch.nn.Module(), q, k, v, None, is_causal=causal, cu_seq_lens_q=boundaries(lengths, q), kernel=kernel,
            max_length_q=max(lengths),
        )[0][0]  # fmt: skip

    return forward


def cudnn(repeats_keys: bool) -> Kernel:
    """cuDNN's variable-length kernel, which torch 2.11 has and does not use."""

    def forward(q: Any, k: Any, v: Any, lengths: Sequence[int], causal: bool) -> torch.Tensor:
        if repeats_keys:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        cu, longest = boundaries(lengths, q), max(lengths)
        out: torch.Tensor = torch.ops.aten._cudnn_attention_forward(
            *rows, None, cu, cu, longest, longest, True, 0.0, causal, False, scale=q.shape[-1] ** -0.5
        )[0]
        return out

    return forward


def padded(*, needs_cudnn: bool) -> Kernel:
    """A causal call per length, rounded up so that few differ: what is behind a segment changes nothing in it."""

    def forward(q: Any, k: Any, v: Any, lengths: Sequence[int], causal: bool) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not causal:
            raise ValueError("only causal attention may be padded")
        starts, pieces = [0, *torch.tensor(lengths).cumsum(0).tolist()], []
        total = starts[-1]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if needs_cudnn else nullcontext():
            for start, length in zip(starts, lengths, strict=False):
                whole = rounded(length)
                end = min(start + whole, total)
                parts = [x[:, :, start:end] for x in (q, k, v)]
                parts = [torch.nn.functional.pad(x, (0, 0, 0, whole - x.shape[2])) for x in parts]
                out = torch.nn.functional.scaled_dot_product_attention(
                    *parts, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
                )
                pieces.append(out[0, :, :length].transpose(0, 1))
        return torch.cat(pieces)

    return forward


def rounded(length: int) -> int:
    """At most an eighth more, of eight lengths between powers of two."""
    unit = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // unit) * unit


def boundaries(lengths: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(like.device, non_blocking=True)


KERNELS: Mapping[str, Kernel] = {
    "varlen": packed(attention.VARLEN),
    "sdpa": packed(attention.SDPA),
    "cudnn": cudnn(False),
    "cudnn, keys repeated": cudnn(True),
    "sdpa, lengths rounded up": padded(needs_cudnn=False),
    "sdpa, lengths rounded up, cuDNN": padded(needs_cudnn=True),
}
