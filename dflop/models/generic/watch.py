"""What a layer keeps and computes in a forward pass on the meta device, where nothing is allocated.

Attention, experts and recurrences are replaced by functions that keep what the fast kernels keep and compute nothing:
flash attention keeps its inputs, its output and one number per query and head; the chunked gated delta rule its inputs
and 64 numbers per token and head; an expert layer sees every token as often as it is routed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from dflop.models.generic.classes import tensors_in
from dflop.models.generic.experts import experts_of
from dflop.models.generic.states import DELTA_RULE
from dflop.models.generic.values import AttentionCall

NAME = "dflop_watched"
"""Name of the attention, mask and experts functions below."""
PACKED = "dflop_flash_watched"
"""Name of the same attention for towers that would cut packed items apart themselves."""
_DELTA_WIDTH = 64
_TRACE = "dflop_trace"


@dataclass(slots=True)
class Trace:
    """One layer in one forward pass."""

    kept_bytes: int = 0
    flops: int = 0
    calls: list[AttentionCall] = field(default_factory=list)
    experts: tuple[int, int] = (0, 0)
    """(all, those of a token)."""
    num_state_values: int = 0
    """Values per token that go into a gated delta rule and come out of it; 0: the layer has none."""
    storages: dict[int, torch.Tensor] = field(default_factory=dict)


def register() -> None:
    """Make the functions known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(PACKED, _attention)
    ExpertsInterface.register(NAME, _experts)


@contextlib.contextmanager
def traced(layer: nn.Module, *, delta_rule: bool = True) -> Iterator[Trace]:
    """Trace a layer of a model that was built with `NAME`, as long as the block runs.

    Kept bytes are of distinct storages, without parameters and without what all layers are given (rotary tables); a
    layer's input counts as its own, its output as the next one's.

    Args:
        layer: Called once inside the block.
        delta_rule: Whether the gated delta rule is replaced as well; its FLOPs are counted where it is not.
    """
    trace, within = Trace(), contextlib.ExitStack()
    ignored: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (key := _storage(tensor)) not in ignored:
            trace.storages[key] = tensor
        return tensor

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [args[1:], [value for name, value in kwargs.items() if name != "hidden_states"]]
        ignored.update(_storage(t) for t in (*module.parameters(), *module.buffers(), *tensors_in(given)))
        within.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        counter = within.enter_context(FlopCounterMode(display=False))
        within.callback(lambda: setattr(trace, "flops", counter.get_total_flops()))

    handles = (
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(lambda *_: within.close()),
    )
    for module in layer.modules():
        setattr(module, _TRACE, trace)
    loops = [module for module in experts_of(layer) if not hasattr(module, "has_gate")]
    for module in loops:  # how often a loop of the class's own runs follows from values, which `meta` does not have
        module.forward = functools.partial(_experts, module)
    try:
        with within, _replaced_delta_rule(layer, trace) if delta_rule else contextlib.nullcontext():
            yield trace
    finally:
        for handle in handles:
            handle.remove()
        for module in layer.modules():
            delattr(module, _TRACE)
        for module in loops:
            del module.forward
    trace.kept_bytes = sum(t.untyped_storage().nbytes() for t in trace.storages.values())
    trace.storages.clear()


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        token_major = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # as kernels for packed samples take them
        ctx.save_for_backward(*token_major, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *gates: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, *gates, value.new_empty(*value.shape[:3], _DELTA_WIDTH))
        return torch.empty_like(value)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    sliding_window: int | None = None, is_causal: bool | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Shapes of `AttentionInterface`: `[batch, heads, tokens, head_dim]` to `[batch, tokens, heads, head_dim]`."""
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    trace: Trace | None = getattr(module, _TRACE, None)
    if trace is not None:
        widths = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        trace.calls.append(AttentionCall(*widths, window=sliding_window or 0, is_causal=causal))
    if not torch.is_grad_enabled():  # nothing is kept; some towers call it once per window of a picture
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    out: torch.Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch's is not typed
    return out, None


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All tokens go to one expert, as often as they are routed: FLOPs and shapes are those of any routing."""
    hidden, num_active, has_gate = hidden_states, top_k_index.shape[-1], hasattr(module, "gate_up_proj")
    up, is_transposed = module.gate_up_proj if has_gate else module.up_proj, getattr(module, "is_transposed", False)
    trace: Trace | None = getattr(module, _TRACE, None)
    if trace is not None:
        trace.experts = (len(up), num_active)
    rows = hidden.repeat_interleave(num_active, dim=0)
    wide = rows @ up[0] if is_transposed else F.linear(rows, up[0])
    wide = module._apply_gate(wide) if has_gate else module.act_fn(wide)
    out = wide @ module.down_proj[0] if is_transposed else F.linear(wide, module.down_proj[0])
    out = out * top_k_weights.reshape(-1, 1)
    return out.view(-1, num_active, hidden.shape[-1]).sum(1).to(hidden.dtype)


@contextlib.contextmanager
def _replaced_delta_rule(layer: nn.Module, trace: Trace) -> Iterator[None]:
    """Within it linear attention keeps what its kernels keep, not what transformers' fallback in torch does."""

    def rule(query: torch.Tensor, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> tuple[torch.Tensor, None]:
        trace.num_state_values = sum(x.numel() for x in (query, key, value, g, beta, value)) // query.shape[1]
        return _DeltaRule.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]  # as above

    files = {sys.modules[type(module).__module__] for module in layer.modules()}
    old = [(file, getattr(file, DELTA_RULE)) for file in files if hasattr(file, DELTA_RULE)]
    for file, _ in old:
        setattr(file, DELTA_RULE, rule)
    try:
        yield
    finally:
        for file, function in old:
            setattr(file, DELTA_RULE, function)
