"""What any multimodal model of transformers is made of, read from its config alone: no file per family, no weights.

The model is built on the meta device and one layer of each kind runs there at two lengths, the others let hidden states
pass. What the layer keeps grows in a straight line, so two lengths give bytes per token; FLOPs are those of torch's
counter, with norms and MLPs as training has them. A model of 671B parameters takes half a second and 40 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dflop.models.fusing import fuse
from dflop.models.generic import watch
from dflop.models.generic.classes import (
    ACTIVE,
    PER_LAYER,
    SHARED,
    PassThrough,
    build,
    entry_of,
    extra_inputs,
    find_decoder,
    trained_config,
)
from dflop.models.generic.encoders import Parts, parts_of
from dflop.models.generic.experts import experts_of
from dflop.models.generic.values import AttentionCall, LayerKind, Structure
from dflop.models.unsupported import EXPERTS

LENGTHS = (512, 1024)
DEGREES = (1, 2, 4, 8, 16)
_NO_MLP = ("attn", "attention", "norm", "router", "mixer")
"""Parts of names of parameters that are no MLP's."""
_FUSED = ("gate_up", "gate_and_up", "w13", "fc1_gated")
"""Parts of names of parameters that are a gate and what it multiplies."""


class _Alike(NamedTuple):
    """What layers of one kind have in common."""

    class_name: str
    layer_type: str
    shapes: tuple[tuple[str, torch.Size], ...]


def read_structure(config: Any) -> Structure:
    """The structure of a model.

    Args:
        config: Of transformers; stays as it is.

    Raises:
        LookupError: the model has no text model with a list of layers.
        Exception: whatever transformers raises for a config that contradicts itself.
    """
    watch.register()
    config = trained_config(config)
    model = build(config, attention=watch.NAME, experts=watch.NAME)
    fuse(model)
    path, decoder = find_decoder(model)
    kinds = tuple(_kind(decoder, of, layers) for of, layers in alike_layers(decoder).items())
    parts: Parts = parts_of(model, path, decoder)
    return Structure(
        model_type=config.model_type, decoder=path, head=parts.head, kinds=kinds, encoders=parts.encoders,
        hidden_size=decoder.config.hidden_size, vocab_size=_vocab_size(model, decoder),
        num_params=sum(p.numel() for p in model.parameters()),
        num_entry_params=parts.num_entry_params, num_exit_params=parts.num_exit_params,
        num_other_params=parts.num_other_params, is_tied=parts.is_tied, others=parts.others,
        is_whole=any(entry_of(decoder.config, key) for key in (PER_LAYER, SHARED)),
    )  # fmt: skip


def _vocab_size(model: Any, decoder: Any) -> int:
    """Rows of the embedding; some have several tables."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return int(weight.shape[0]) if weight is not None else int(decoder.config.vocab_size)


def alike_layers(decoder: Any) -> Mapping[_Alike, tuple[int, ...]]:
    """Indices of a decoder's layers by class, `layer_types` entry and shapes of parameters, in order of the first."""
    return alike(decoder.layers, entry_of(decoder.config, "layer_types") or ())


def alike(layers: Iterable[nn.Module], types: Sequence[str] = ()) -> Mapping[_Alike, tuple[int, ...]]:
    """The same of any layers."""
    found: dict[_Alike, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        shapes = tuple((name, p.shape) for name, p in layer.named_parameters())
        of = _Alike(type(layer).__name__, types[index] if index < len(types) else "", shapes)
        found[of] = (*found.get(of, ()), index)
    return found


def _kind(decoder: Any, of: _Alike, layers: tuple[int, ...]) -> LayerKind:
    short, long = (_run(decoder, layers[0], length) for length in LENGTHS)
    flops = short.flops if not short.num_state_values else _run(decoder, layers[0], LENGTHS[0], delta_rule=False).flops
    chunk = int(entry_of(decoder.config, "attention_chunk_size") or 0) if "chunked" in of.layer_type else 0
    runs = Runs(LENGTHS, (short, long), flops, chunk)
    return kind_of(decoder.layers[layers[0]], layers, runs, decoder.config, decoder.config.hidden_size)


class Runs(NamedTuple):
    """Two runs of one layer."""

    lengths: tuple[int, int]
    """Tokens of each; where they are the same, nothing is kept beside what is kept per token."""
    traces: tuple[watch.Trace, watch.Trace]
    flops: float
    """FLOPs of the first one."""
    chunk: int = 0
    """Tokens attend inside chunks of this length; 0: no chunks."""


def kind_of(layer: nn.Module, layers: tuple[int, ...], runs: Runs, config: Any, hidden_size: int) -> LayerKind:
    """The kind of a layer of a decoder or a tower.

    Args:
        layer: One of the kind.
        layers: Indices of all of them.
        runs: Of the layer.
        config: Of the decoder or tower.
        hidden_size: Of the layer.
    """
    (short, long), (few, many) = runs.traces, runs.lengths
    per_token = (long.kept_bytes - short.kept_bytes) / (many - few) if many > few else short.kept_bytes / few
    num_experts, num_active = short.experts if short.experts[0] else _stated_experts(layer, config)
    num_params = sum(p.numel() for p in layer.parameters())
    of_experts = sum(p.numel() for p in _expert_params(layer, num_experts))
    calls = tuple(_with_chunk(call, runs.chunk) for call in short.calls)
    mlp_width, is_gated = mlp_of(layer, hidden_size, (num_experts, num_active))
    return LayerKind(
        mixer=_mixer(layer, short, runs.chunk), layers=layers, num_params=num_params,
        num_active_params=num_params - (of_experts * (num_experts - num_active) // num_experts if num_experts else 0),
        flops_per_token=runs.flops / few, kept_bytes_per_token=per_token, kept_bytes=short.kept_bytes - per_token * few,
        attention=calls, num_experts=num_experts, num_active_experts=num_active,
        degrees=_degrees(layer, calls, entry_of(config, "base_model_tp_plan") or {}),
        mlp_width=mlp_width, is_gated_mlp=is_gated, num_matrix_params=max(p.numel() for p in layer.parameters()),
        num_stacked_params=sum(p.numel() for experts in experts_of(layer) for p in experts.parameters()),
        num_state_values=short.num_state_values,
    )  # fmt: skip


def _run(decoder: Any, index: int, length: int, *, delta_rule: bool = True) -> watch.Trace:
    """One layer of a decoder over a sample of `length`, where every other lets hidden states pass."""
    whole, device = decoder.layers, next(decoder.parameters()).device
    hidden = torch.zeros(1, length, decoder.config.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        if not entry_of(decoder.config, SHARED):  # else a layer may need others' keys
            decoder.layers = nn.ModuleList(x if i == index else PassThrough(x) for i, x in enumerate(whole))
        with watch.traced(whole[index], delta_rule=delta_rule) as trace:
            decoder(inputs_embeds=hidden, use_cache=False, **extra_inputs(decoder, length, device, torch.bfloat16))
    finally:
        decoder.layers = whole
    return trace


def _with_chunk(call: AttentionCall, chunk: int) -> AttentionCall:
    widths = (call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim)
    return AttentionCall(*widths, window=0, chunk=chunk, is_causal=call.is_causal) if chunk else call


def _mixer(layer: nn.Module, trace: watch.Trace, chunk: int) -> str:
    names = {name.rpartition(".")[2] for name, _ in (*layer.named_modules(), *layer.named_parameters())}
    if trace.calls:
        if "kv_b_proj" in names:
            return "latent attention"
        if chunk:
            return "chunked attention"
        return "sliding attention" if all(call.window for call in trace.calls) else "full attention"
    if trace.num_state_values:
        return "gated delta"
    if "A_log" in names:
        return "state space"
    return "convolution" if any(isinstance(m, nn.Conv1d) for m in layer.modules()) else "none"


def _stated_experts(layer: nn.Module, config: Any) -> tuple[int, int]:
    """(all, those of a token) of a layer with an experts' code of its own; (0, 0) of one without experts."""
    for num in filter(None, (entry_of(config, key) for key in EXPERTS)):
        if isinstance(num, int) and any(True for _ in _expert_params(layer, num)):
            active = next((value for key in ACTIVE if isinstance(value := entry_of(config, key), int)), num)
            return num, active
    return 0, 0


def _expert_params(layer: nn.Module, num_experts: int) -> Iterator[nn.Parameter]:
    """Parameters that experts have one each of: stacked along the first axis, or in a list of modules."""
    stacked: Iterable[nn.Parameter] = (p for p in layer.parameters() if p.ndim == 3 and len(p) == num_experts > 1)
    yield from stacked
    for module in layer.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_experts > 1:
            yield from module.parameters()


def _degrees(layer: nn.Module, calls: Iterable[AttentionCall], plan: Mapping[str, str]) -> tuple[int, ...]:
    """Degrees that divide every size which the class's plan cuts, and the heads; 1 alone where it states no plan."""
    rules = {name.removeprefix("layers.*."): how for name, how in plan.items() if name.startswith("layers.*.")}
    sizes = [n for call in calls for n in (call.num_heads, call.num_kv_heads)]
    for name, p in layer.named_parameters():
        how = rules.get(name) or rules.get(name.removesuffix(".weight"), "")
        if p.ndim > 1 and how and "rep" not in how:
            sizes.append(p.shape[-2] if how.startswith(("colwise", "packed_colwise")) else p.shape[-1])
    return tuple(tp for tp in DEGREES if all(size % tp == 0 for size in sizes)) if rules else (1,)


def mlp_of(layer: nn.Module, hidden_size: int, experts: tuple[int, int] = (0, 0)) -> tuple[int, bool]:
    """(width of the MLP that a token passes through, whether it is gated); (0, False) where no MLP is found.

    Args:
        layer: Of a decoder or of a tower.
        hidden_size: Width of its hidden states.
        experts: (all, those of a token) of the layer.
    """
    num_experts, num_active = experts
    into: dict[str, int] = {}
    out = 0
    for name, p in layer.named_parameters():
        if p.ndim < 2 or any(word in name.lower() for word in _NO_MLP):
            continue
        rows, columns = p.shape[-2:]
        if hidden_size not in (rows, columns):
            continue
        width = columns if rows == hidden_size else rows
        if num_experts and p.ndim == 3 and p.shape[0] == num_experts:
            width *= num_active
        elif num_experts and f".{num_experts - 1}." in name:
            width *= num_active  # a list of modules: the last one stands for all
        elif num_experts and any(part.isdigit() for part in name.split(".")) and ".experts." in f".{name}":
            continue
        if any(word in name for word in _FUSED):
            into[name] = width // 2
            into[name + ".gate"] = width // 2
        elif "down" in name or "fc2" in name or "linear_2" in name or (rows == hidden_size and "up" not in name):
            out += width
        else:
            into[name] = width
    return out, sum(into.values()) >= 2 * out > 0
