"""Exact block-diagonal attention over packed sequences, registered with transformers as `dflop_packed`.

A microbatch is one row of tokens holding several samples back to back; `cu_seq_lens_q` says where each starts. On
CUDA in half precision a variable-length kernel does this in one call: FlashAttention-3's, flash-attn's or torch's own.
Elsewhere segments of one length share an SDPA call, so the cost is the sum of squares and never the square of the sum,
and no T x T mask is ever built.

Where context-parallel ranks share samples, the first segment may have keys on other ranks: those of the tokens in front
of its own. Queries are then the last of their segment, so causal masks are aligned at their ends.

Names: transformers looks attention up by the name in a module's config, and hands a whole packed sequence only to
implementations with `flash` in their names; the towers of Qwen would cut it into segments themselves, with a call for
every window. So the function has two names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dflop.errors import ConfigError
from dflop.models.autograd import opaque

PACKED = "dflop_packed"
AUTO, FLASH3, FLASH, VARLEN, SDPA = "auto", "flash3", "flash", "varlen", "sdpa"
_HOPPER = 9
"""Major number of its compute capability."""
Window = tuple[int, int]
"""Keys before and behind a token that it attends to; -1: all."""


@dataclass(slots=True, eq=False)
class ByHeads:
    """How ranks that share samples come to have all tokens of these in a part of the heads, and back."""

    num_first: int
    """Tokens of the first sample of this rank, where others have of it, too; else 0."""
    num_last: int
    """The same of the last sample, unless it is the first."""
    lengths: list[int]
    """Tokens of every sample that ranks share, whole."""
    num_ranks: int
    to_heads: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
    """`[num_first + num_last, heads, ...]` to `[sum(lengths), heads / num_ranks, ...]`; collective in both passes."""
    to_tokens: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
    """The way back."""


@dataclass(slots=True, eq=False)
class Earlier:
    """What context-parallel ranks give one another of samples that they share, in every layer.

    No tuple: compilers look into those, and would compile anew for every microbatch's.
    """

    num_given: int
    """How many of this rank's last tokens later ranks need."""
    num_taken: int
    """Tokens of the first segment that earlier ranks have."""
    exchange: Callable[[torch.Tensor], torch.Tensor]
    """`[num_given, ...]` of this rank to `[num_taken, ...]` of others; differentiable, collective in both passes."""
    last: Callable[[torch.Tensor, int], torch.Tensor]
    """The same of all tokens of this rank, but no more than so many of those that stand right in front of it."""
    by_heads: ByHeads


@dataclass(slots=True, eq=False)
class FrameKeys:
    """Keys and values of whole frames, of which context-parallel ranks have a part each; no tuple, as `Earlier`."""

    bounds: torch.Tensor
    """int32 `[segments + 1]`: where the frames of a rank's segments begin and end, one after the other."""
    longest: int
    exchange: Callable[[torch.Tensor], torch.Tensor]
    """`[tokens, ...]` of this rank to `[bounds[-1], ...]`; differentiable, collective in both passes."""


class Bounds(NamedTuple):
    """Where segments begin and end, in queries and in keys."""

    queries: torch.Tensor
    """int32 `[segments + 1]`."""
    keys: torch.Tensor
    longest_queries: int
    longest_keys: int


CUTTING = "dflop_flash_packed"
"""Name of the same for modules that would cut a packed sequence themselves."""
_KERNEL = "dflop_kernel"
"""Attribute of modules: the kernel that they use."""


@functools.cache
def register() -> None:
    """Make both names known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    for name in (PACKED, CUTTING):
        AttentionInterface.register(name, opaque(packed_attention))


def use(module: torch.nn.Module, kernel: str) -> None:
    """Let the layers of a module use a kernel: `auto`, or what `resolve` returned."""
    for part in module.modules():
        setattr(part, _KERNEL, kernel)


def resolve(kernel: str, device_type: str, dtype: torch.dtype) -> str:
    """The kernel that `model.attention` means on a device.

    Args:
        kernel: `auto`, `flash3` (FlashAttention-3, for Hopper), `flash` (the flash-attn package), `varlen` (torch's
            own) or `sdpa` (a call per length).
        device_type: `cpu` or `cuda`.
        dtype: Of the model.

    Raises:
        ConfigError: it cannot run there.
    """
    is_able = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if kernel == AUTO:
        return next((name for name in VARLEN_KERNELS if is_able and not _missing(name)), SDPA)
    if kernel != SDPA and not is_able:
        short = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"attention `{kernel}` runs on CUDA in bfloat16, not on {device_type} in {short}",
            where="model.attention",
            hint="`sdpa` runs everywhere; `auto` takes the best there is",
        )
    if kernel != SDPA and (reason := _missing(kernel)):
        raise ConfigError(
            f"attention `{kernel}` cannot be imported: {reason}", where="model.attention", hint="`auto` does without"
        )
    return kernel


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    earlier: Earlier | None = None,
    frame_keys: FrameKeys | None = None,
    sliding_window: int | None = None,
    kernel: str = "",
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each packed segment.

    Args:
        module: Attention layer; its `is_causal` applies unless `is_causal` is given.
        query_BHTD: `[batch, heads, tokens, head_dim]`.
        key_BGTD: `[batch, kv_heads, tokens, head_dim]`.
        value_BGTD: As `key_BGTD`.
        attention_mask: Must be None: segments come from `cu_seq_lens_q`.
        scaling: Factor on the scores; None means `head_dim ** -0.5`.
        dropout: Attention dropout probability.
        is_causal: Overrides the layer's own flag.
        cu_seq_lens_q: int32 `[segments + 1]` boundaries in the sequences of the batch one after the other; segments may
            be empty; None means that each sequence is one segment.
        cu_seq_lens_k: The same of keys, where `earlier` adds some: queries are the last of their segment. None: as
            those of queries.
        max_length_q: Tokens of the longest segment, where the caller knows it: to ask a GPU is to wait for it.
        max_length_k: The same of keys.
        earlier: Adds keys and values of other ranks in front of the first segment's, in a batch of one.
        frame_keys: Adds those of the frames that segments are parts of, in a batch of one.
        sliding_window: Keys that a token attends to at most, itself among them; None: all before it.
        kernel: One of `resolve`, `auto` decides from the tensors; empty: what `use` set.

    Returns:
        `[batch, tokens, heads, head_dim]` and no weights.

    Raises:
        ValueError: a mask is given, which this attention would have to ignore, or a window that looks both ways.
    """
    if attention_mask is not None:
        raise ValueError(f"`{PACKED}` attention takes no attention_mask: pack samples and pass cu_seq_lens_q")
    batch, length = query_BHTD.shape[0], query_BHTD.shape[2]
    if cu_seq_lens_q is not None and batch > 1:
        rows = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query_BHTD, key_BGTD, value_BGTD))
        query, key, value = rows
        out = packed_attention(
            module, query, key, value, None, scaling=scaling, dropout=dropout, is_causal=is_causal, kernel=kernel,
            cu_seq_lens_q=cu_seq_lens_q, max_length_q=max_length_q, sliding_window=sliding_window,
        )[0]  # fmt: skip
        return out.unflatten(1, (batch, length))[0], None
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise ValueError(f"`{PACKED}` attention has sliding windows for causal layers only")
    window = (-1 if sliding_window is None else sliding_window - 1, 0) if causal else (-1, -1)
    chosen = kernel or getattr(module, _KERNEL, AUTO)
    if chosen == AUTO:
        chosen = resolve(AUTO, query_BHTD.device.type, query_BHTD.dtype)
    if earlier is not None:
        key_BGTD, value_BGTD = _with_earlier(key_BGTD, value_BGTD, earlier)
    if frame_keys is not None:
        whole = frame_keys.exchange(torch.cat([key_BGTD, value_BGTD], dim=1)[0].transpose(0, 1))
        key_BGTD, value_BGTD = whole.transpose(0, 1)[None].chunk(2, dim=1)
        cu_seq_lens_k, max_length_k = frame_keys.bounds, frame_keys.longest
    cu_keys = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    if cu_seq_lens_q is None or cu_keys is None or chosen == SDPA:
        lengths = _lengths(cu_seq_lens_q, length)
        of_keys = lengths if cu_keys is cu_seq_lens_q else _lengths(cu_keys, length)
        return _segments(query_BHTD, key_BGTD, value_BGTD, lengths, of_keys, scale, dropout, window), None
    longest, longest_keys = (
        int((cu[1:] - cu[:-1]).max()) if known is None else int(known)
        for cu, known in ((cu_seq_lens_q, max_length_q), (cu_keys, max_length_k))
    )
    packed = [x[0].transpose(0, 1).contiguous() for x in (query_BHTD, key_BGTD, value_BGTD)]
    bounds = Bounds(cu_seq_lens_q.to(torch.int32), cu_keys.to(torch.int32), longest, longest_keys)
    out = VARLEN_KERNELS[chosen](*packed, bounds, scale, dropout, window)
    return out[None], None


def _lengths(bounds: torch.Tensor | None, length: int) -> list[int]:
    found: list[int] = [length] if bounds is None else (bounds[1:] - bounds[:-1]).tolist()
    return found


def _with_earlier(key: torch.Tensor, value: torch.Tensor, earlier: Earlier) -> tuple[torch.Tensor, torch.Tensor]:
    """`[1, kv_heads, num_taken + tokens, head_dim]`; both go in one message."""
    own = [x[0].transpose(0, 1) for x in (key, value)]
    given = torch.cat([x[len(x) - earlier.num_given :] for x in own], dim=1)
    taken = earlier.exchange(given).chunk(2, dim=1)
    whole_key, whole_value = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(taken, own, strict=True))
    return whole_key, whole_value


def _segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], of_keys: Sequence[int],
    scale: float, drop: float, window: Window,
) -> torch.Tensor:  # fmt: skip
    """`[batch, tokens, heads, head_dim]`; segments of one length that are neighbours share a call."""
    pieces = []
    runs = list(_runs(lengths, of_keys))
    cuts = [[count * run[side] for count, run in runs] for side in (0, 1, 1)]
    split = (x.split(cut, dim=2) for x, cut in zip((query, key, value), cuts, strict=True))
    for (count, (length, num_keys)), *run in zip(runs, *split, strict=True):
        # With several segments there is one sequence: `[1, heads, count * length, d]` -> `[count, heads, length, d]`.
        q, k, v = (x if count == 1 else x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in run)
        band = _band(length, num_keys, window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, dropout_p=drop, is_causal=window[1] == 0 and band is None, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        ).transpose(1, 2)  # fmt: skip
        pieces.append(out if count == 1 else out.flatten(0, 1)[None])
    return torch.cat(pieces, dim=1)


def _runs(lengths: Sequence[int], of_keys: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(number of segments, their queries and keys) of neighbours of one length, without empty ones unless all are."""
    if not any(lengths):
        yield 1, (0, 0)
    for length, run in itertools.groupby(pair for pair in zip(lengths, of_keys, strict=True) if pair[0]):
        yield len(list(run)), length


def _band(length: int, num_keys: int, window: Window, device: torch.device) -> torch.Tensor | None:
    """Mask of a causal segment that is longer than its window, or has keys before its first query; None: none needed.

    Queries are the last tokens of the segment.
    """
    before, behind = window
    if behind != 0 or (length == num_keys and (before < 0 or length <= before + 1)):
        return None
    seen = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(num_keys - length)
    return seen if before < 0 else seen.triu(num_keys - length - before)


def _flash3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scale: float, drop: float, window: Window,
) -> torch.Tensor:  # fmt: skip
    flash_attn_varlen_func = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    _refuse_dropout("FlashAttention-3", drop)
    out = flash_attn_varlen_func(
        q, k, v, *bounds, softmax_scale=scale, causal=window[1] == 0, window_size=window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out  # older releases hand on the logarithms, too
    return found


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scale: float, drop: float, window: Window,
) -> torch.Tensor:  # fmt: skip
    from flash_attn import flash_attn_varlen_func

    out: torch.Tensor = flash_attn_varlen_func(
        q, k, v, *bounds, dropout_p=drop, softmax_scale=scale, causal=window[1] == 0,
        window_size=window, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return out


def _torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scale: float, drop: float, window: Window,
) -> torch.Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    _refuse_dropout("torch's variable-length attention", drop)
    groups = q.shape[1] // k.shape[1]
    if "enable_gqa" in _parameters(varlen_attn):
        options: dict[str, Any] = {"scale": scale, "enable_gqa": groups > 1}
    else:  # an older release: as many heads of keys as of queries, and 1/sqrt(head_dim)
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        q, options = q * (scale * q.shape[-1] ** 0.5), {}
    out = varlen_attn(q, k, v, *bounds, window_size=window, **options)
    assert isinstance(out, torch.Tensor)
    return out


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters; asked in every layer, where launching kernels is what takes the time."""
    return frozenset(inspect.signature(function).parameters)


def _refuse_dropout(kernel: str, drop: float) -> None:
    if drop:
        raise ConfigError(
            f"{kernel} has no dropout (attention_dropout is {drop:g})",
            where="model.hf_config",
            hint="set it to 0, or install flash-attn and set model.attention to flash",
        )


VARLEN_KERNELS: dict[str, Callable[..., torch.Tensor]] = {FLASH3: _flash3, FLASH: _flash, VARLEN: _torch_varlen}
"""(q, k, v `[tokens, heads, head_dim]`, bounds, scale, dropout, window) -> `[tokens, heads, head_dim]`."""


@functools.cache
def _missing(kernel: str) -> str:
    """Why a kernel cannot be had; empty if it can."""
    try:
        if kernel == FLASH3:
            importlib.import_module("flash_attn_interface")
            if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != _HOPPER:
                return "FlashAttention-3 is for Hopper GPUs"
        elif kernel == FLASH:
            from flash_attn import flash_attn_varlen_func  # noqa: F401  # only whether it can be imported
        else:
            from torch.nn.attention.varlen import varlen_attn  # noqa: F401  # only whether it can be imported
    except ImportError as error:
        # Not there, or built for another torch.
        return str(error)
    return ""
