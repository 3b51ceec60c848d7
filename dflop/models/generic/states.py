"""Layers that carry a state along a sample's tokens, where context-parallel ranks share samples.

The class's own forward runs on a rank's tokens; two functions in it see others. A causal convolution is given the few
tokens in front of the rank's own. The chunked gated delta rule has a state per head that passes over a whole sample:
ranks exchange tokens for heads, so that each has all tokens of the shared samples in a part of the heads (as Ulysses
does for attention, arXiv 2309.14509), and send back what comes out. Samples that one rank has alone stay there.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.models.autograd import opaque

if TYPE_CHECKING:
    from dflop.models.generic.packed import Holder, Samples

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""Names by which the forward of a class of transformers finds them in its file."""


def has_state(module: nn.Module) -> bool:
    """Whether a part of a layer carries a state along the tokens: it holds a convolution."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def across_ranks(module: nn.Module, holder: Holder) -> Callable[..., Any] | None:
    """The forward of a part with a state, for ranks that share samples.

    Args:
        module: `has_state` of it.
        holder: Knows the samples of the forward pass at hand.

    Returns:
        None if the state passes through other functions: the module has parameters of its own (decays) and its
        forward calls no delta rule.
    """
    whole = inspect.unwrap(type(module).forward)
    names = whole.__code__.co_names
    has_decays = any(True for _ in module.parameters(recurse=False))
    if CONVOLUTION not in names or (has_decays and DELTA_RULE not in names):
        return None
    ours = {CONVOLUTION: opaque(_convolution), DELTA_RULE: opaque(_delta_rule)}
    known = whole.__globals__
    seen = known | {name: functools.partial(ours[name], known[name], holder) for name in ours if name in names}
    forward = types.FunctionType(whole.__code__, seen, whole.__name__, whole.__defaults__, whole.__closure__)
    return functools.partial(_with_a_token, forward, module)


def _with_a_token(
    forward: Callable[..., torch.Tensor], module: nn.Module, hidden_states: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """`[1, tokens, hidden]`; a rank without tokens computes one for nothing: classes cannot reshape none."""
    missing = int(not hidden_states.shape[1])
    out = forward(module, F.pad(hidden_states, (0, 0, 0, missing)), **kwargs)
    return out[:, missing:]


def _lengths(samples: Samples, num_tokens: int) -> list[int]:
    return samples.lengths if any(samples.lengths) else [num_tokens]


def _convolution(
    convolve: Callable[..., torch.Tensor], holder: Holder, tokens_BCT: torch.Tensor, weight: torch.Tensor, *args: Any,
    **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """`[1, channels, tokens]` of every sample, the first of which begins on other ranks."""
    samples = holder.samples
    assert samples is not None
    assert samples.earlier is not None
    before = samples.earlier.last(tokens_BCT[0].t(), weight.shape[-1] - 1)
    first, *others = tokens_BCT.split(_lengths(samples, tokens_BCT.shape[2]), dim=2)
    whole = torch.cat([before.t()[None], first], dim=2)
    outs = [convolve(part, weight, *args, **kwargs) if part.shape[2] else part for part in (whole, *others)]
    outs[0] = outs[0][:, :, len(before) :]
    return torch.cat(outs, dim=2)


def _delta_rule(
    rule: Callable[..., Any], holder: Holder, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *,
    g: torch.Tensor, beta: torch.Tensor, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`[1, tokens, heads, width]` of samples, of which the first and the last may have tokens on other ranks."""
    samples = holder.samples
    assert samples is not None
    assert samples.earlier is not None
    shared = samples.earlier.by_heads

    def run(tensors: Sequence[torch.Tensor], lengths: list[int]) -> Iterator[torch.Tensor]:
        for q, k, v, decay, b in zip(*(x.split(lengths, dim=1) for x in tensors), strict=True):
            yield rule(q, k, v, g=decay, beta=b, **kwargs)[0] if q.shape[1] else v

    given = query, key, value, g, beta
    ends, inside = (shared.num_first, shared.num_last), query.shape[1] - shared.num_first - shared.num_last
    first, own, last = zip(*(x.split((ends[0], inside, ends[1]), dim=1) for x in given), strict=True)
    lengths = _lengths(samples, query.shape[1])
    alone = lengths[bool(ends[0]) : len(lengths) - bool(ends[1])]
    heads = _to_heads([torch.cat(pair, dim=1)[0] for pair in zip(first, last, strict=True)], shared.num_ranks)
    taken = _of_heads(shared.to_heads(heads), given)
    made = torch.cat([*run(taken, shared.lengths)], dim=1)[0].unflatten(1, (heads[0].shape[1] // shared.num_ranks, -1))
    (back,) = shared.to_tokens((made.flatten(2),))
    back = back[:, : key.shape[2]].reshape(1, sum(ends), *value.shape[2:])
    middle = run(own, alone) if inside else (own[2],)
    return torch.cat([back[:, : ends[0]], *middle, back[:, ends[0] :]], dim=1), None


def _to_heads(given: Sequence[torch.Tensor], num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries, keys, values and betas; decays), `[tokens, heads of keys, width]`: as many heads as ranks divide.

    Heads of values go with the one of keys that they are grouped under. Decays are more precise than the others.
    """
    query, key, *of_values = given
    missing = -key.shape[1] % num_ranks
    value, decay, beta = (x.unflatten(1, (key.shape[1], -1)).flatten(2) for x in of_values)
    wide = torch.cat([query, key, value, beta], dim=2)
    return F.pad(wide, (0, 0, 0, missing)), F.pad(decay, (0, 0, 0, missing))


def _of_heads(taken: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `_to_heads` put together, `[1, tokens, heads, width]`, in the types of `like`, which has all heads."""
    query, key, value, *_ = like
    per_key = value.shape[2] // key.shape[2]
    widths = [query.shape[3], key.shape[3], per_key * value.shape[3], per_key]
    q, k, v, b = taken[0][None].split(widths, dim=3)
    found = q, k, v.unflatten(3, (per_key, -1)).flatten(2, 3), taken[1][None].flatten(2), b.flatten(2)
    return [x.to(of.dtype) for x, of in zip(found, like, strict=True)]
