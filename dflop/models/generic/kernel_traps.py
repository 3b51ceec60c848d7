"""What training would compute several times slower than it could on this device: measured in seconds, with a remedy.

Each was reported to cost a multiple, without an error or a word: vision patches in a 3D convolution, a linear attention
or a short convolution without its kernels, experts in a Python loop, attention by torch's unfused fallback.

On CPUs the delta rule and stacked experts are not timed: nothing follows there, and importing their classes takes 4 s.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.models.generic.values import Structure

PATCHES, DELTA, CONVOLUTION, EXPERTS, OWN_EXPERTS, ATTENTION = (
    "3D convolution of patches", "gated delta", "convolution", "experts", "custom experts", "attention",
)  # fmt: skip
"""What a model may use."""
EVERYTHING = (PATCHES, DELTA, CONVOLUTION, EXPERTS, ATTENTION)
_NUM_REPEATS, _NUM_TOKENS, _WIDTH = 3, 512, 256


@dataclass(frozen=True, slots=True)
class Trap:
    """One thing that may be slow."""

    name: str
    is_hit: bool
    """Whether training on this device runs into it."""
    factor: float | None
    """Seconds of the slow way over those of the fast one, measured here; None: both cannot run here."""
    detail: str
    remedy: str = ""
    """One sentence; empty: there is nothing to do."""

    def __str__(self) -> str:
        return f"{self.detail} (x{self.factor:.1f} here)" if self.factor else self.detail


def kernel_traps(
    uses: Collection[str] = EVERYTHING, head_dims: Collection[int] = (64, 128), device: str | None = None
) -> tuple[Trap, ...]:
    """What is slow of all that a model uses.

    Args:
        uses: Names of what it uses, `EVERYTHING` without a model.
        head_dims: Widths of its heads.
        device: `cpu` or `cuda`; None: a GPU if there is one.
    """
    at = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if at.type == "cuda" else torch.float32
    with torch.no_grad(), at:
        return tuple(_found(set(uses), tuple(sorted(head_dims)), at, dtype))


def traps_of(structure: Structure) -> tuple[Trap, ...]:
    """The same of a model."""
    kinds = (*structure.kinds, *(kind for of in structure.encoders for kind in of.kinds))
    uses = {ATTENTION} | ({PATCHES} if any(of.medium == "vision" for of in structure.encoders) else set())
    uses |= {DELTA} if any(kind.mixer == "gated delta" for kind in kinds) else set()
    uses |= {CONVOLUTION} if any(kind.mixer in ("convolution", "state space") for kind in kinds) else set()
    uses |= {EXPERTS} if any(kind.num_experts for kind in kinds) else set()
    uses |= {OWN_EXPERTS} if any(kind.num_experts and not kind.num_stacked_params for kind in kinds) else set()
    return kernel_traps(uses, {call.head_dim for kind in kinds for call in kind.attention} or {64})


def _found(uses: set[str], head_dims: tuple[int, ...], at: torch.device, dtype: torch.dtype) -> Iterator[Trap]:
    is_gpu = at.type != "cpu"
    if PATCHES in uses:
        yield _patches(dtype)
    if DELTA in uses:
        yield _package("fla", "pip install flash-linear-attention", DELTA, at, _delta_factor(dtype) if is_gpu else None)
    if uses & {DELTA, CONVOLUTION}:
        yield _package("causal_conv1d", "pip install causal-conv1d", CONVOLUTION, at, None)
    if EXPERTS in uses:
        yield _experts(dtype, is_own=OWN_EXPERTS in uses, is_timed=is_gpu or OWN_EXPERTS in uses)
    if ATTENTION in uses:
        yield _attention(head_dims, dtype)
        yield _package("flash_attn", "pip install 'dflop[flash]'", ATTENTION, at, None)


def _patches(dtype: torch.dtype) -> Trap:
    conv = nn.Conv3d(3, _WIDTH, (2, 14, 14), stride=(2, 14, 14), dtype=dtype)
    linear = nn.Linear(3 * 2 * 14 * 14, _WIDTH, dtype=dtype)
    patches = torch.randn(_NUM_TOKENS, 3, 2, 14, 14, dtype=dtype)
    factor = _factor(lambda: conv(patches), lambda: linear(patches.flatten(1)))
    return Trap(PATCHES, False, factor, "training uses a Linear in its place")


def _package(module: str, how: str, of: str, at: torch.device, factor: float | None) -> Trap:
    """A package with kernels, which run on GPUs."""
    is_there = importlib.util.find_spec(module) is not None
    slow = "; the fallback of torch is compared with attention of the same width" if factor else ""
    if at.type == "cpu" or is_there:
        return Trap(module, False, factor, ("installed" if is_there else "not used on CPUs") + slow)
    return Trap(module, True, factor, f"not installed, so {of} runs without its kernels{slow}", how)


def _delta_factor(dtype: torch.dtype) -> float | None:
    """Factor of transformers' gated delta rule in torch over attention of as many heads; None: it has another name."""
    try:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule
    except ImportError:
        return None
    q, k, v = torch.randn(3, 1, _NUM_TOKENS, 4, 64, dtype=dtype).unbind()
    gate, beta = torch.rand(2, 1, _NUM_TOKENS, 4, dtype=dtype).unbind()
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return _factor(lambda: rule(q, k, v, -gate, beta), lambda: F.scaled_dot_product_attention(*heads, None, 0.0, True))


def _experts(dtype: torch.dtype, *, is_own: bool, is_timed: bool) -> Trap:
    """Transformers' loop over experts against its grouped product."""
    grouped = "one grouped product in place of a loop in Python"
    if not is_timed:
        return Trap(EXPERTS, False, None, grouped)
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config: Any = Qwen3MoeConfig(
        num_experts=32, hidden_size=_WIDTH, moe_intermediate_size=_WIDTH, num_experts_per_tok=4
    )
    experts = Qwen3MoeExperts(config).to(dtype)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.02)
    hidden, (weights, chosen) = torch.randn(_NUM_TOKENS, _WIDTH, dtype=dtype), torch.rand(_NUM_TOKENS, 32).topk(4)

    def run(how: str) -> torch.Tensor:
        config._experts_implementation = how
        out: torch.Tensor = experts(hidden, chosen, weights.to(dtype))
        return out

    factor = _factor(lambda: run("eager"), lambda: run("grouped_mm"))
    if is_own:
        remedy = "use a model type whose class stacks experts along one axis, which one grouped product computes"
        return Trap(
            EXPERTS,
            True,
            factor,
            "the class has custom code; compared are a Python loop and a grouped product",
            remedy,
        )
    return Trap(EXPERTS, False, factor, grouped)


def _attention(head_dims: tuple[int, ...], dtype: torch.dtype) -> Trap:
    """Whether torch has a fused kernel for heads of these widths, and what its fallback would cost."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    unfused = []
    for width in head_dims:
        q = torch.randn(1, 8, _NUM_TOKENS, width, dtype=dtype)
        if torch._fused_sdp_choice(q, q, q, None, 0.0, True) == SDPBackend.MATH.value:
            unfused.append(width)

    def fallback() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    factor = _factor(fallback, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    if not unfused:
        return Trap(ATTENTION, False, factor, "torch has a fused kernel, compared with its fallback")
    widths = ", ".join(map(str, unfused))
    remedy = "train in bfloat16 on a GPU, and install flash-attn where heads are wider than torch's kernels take"
    return Trap(ATTENTION, True, None, f"torch has no fused kernel for heads of {widths}", remedy)


def _factor(slow: Callable[[], Any], fast: Callable[[], Any]) -> float:
    return _seconds(slow) / _seconds(fast)


def _seconds(run: Callable[[], Any]) -> float:
    """Median of some runs after a warm-up."""
    found = []
    for _ in range(1 + _NUM_REPEATS):
        _wait()
        started = time.perf_counter()
        run()
        _wait()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
