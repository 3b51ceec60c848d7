"""Reads a model's facts from its classes and its processor: the slow half of `facts.py`, with torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dflop.errors import ConfigError
from dflop.models.arrays import SAMPLE_RATE_HZ
from dflop.models.generic import arrays, watch
from dflop.models.generic.arrays import GRID
from dflop.models.generic.check import quiet_transformers, structure_of
from dflop.models.generic.classes import layers_of, trained_config
from dflop.models.generic.exact import small_model
from dflop.models.generic.facts import Medium, ModelFacts
from dflop.models.generic.folder import read_config, reason
from dflop.models.generic.frame_parts import merge_tokens_of
from dflop.models.generic.items import form_of, form_of_item, rows_of
from dflop.models.generic.lengths import Lengths, encoder_lengths, recorded
from dflop.models.generic.llm_stage import why_whole
from dflop.models.generic.media_check import check_medium, grid
from dflop.models.generic.media_processor import MediaProcessor, load_processor
from dflop.models.generic.meta_run import WithoutValues, empty_model, run_encoders
from dflop.models.generic.specs import decoder_of, places_of, towers_of
from dflop.models.generic.stage_rules import untrained
from dflop.models.generic.structure import DEGREES, Runs, alike, kind_of
from dflop.models.generic.tokens import PROBES
from dflop.models.generic.values import AttentionCall, Encoder, Structure
from dflop.models.media import MediaHeader
from dflop.models.splits import degrees_of
from dflop.models.unsupported import refuse_missing_files

_WHERE = "model.hf_config"
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "nhead")
"""Attributes of modules that count an attention's heads."""


def read_facts(key: str, hf_config: Mapping[str, Any], folder: Path) -> ModelFacts:
    """The facts of a model.

    Args:
        key: Hash of what they are read from.
        hf_config: Content of its `config.json`.
        folder: With processor and tokenizer.

    Raises:
        ConfigError: dflop does not take such a model; the message names the key and what to do.
    """
    with quiet_transformers():
        structure = structure_of(read_config(hf_config, _WHERE), _WHERE)
        refuse_missing_files(folder)
        processor, model = MediaProcessor(load_processor(folder)), empty_model(hf_config)
        media = []
        for kind in processor.kinds:
            medium, encoder = _medium(processor, kind, structure, model)
            media.append(medium)
            if encoder is not None:
                encoders = tuple(encoder if of.path == encoder.path else of for of in structure.encoders)
                structure = replace(structure, encoders=encoders)
        return ModelFacts(key, structure, _with_one_form(media), *_tried(hf_config, structure))


def _tried(hf_config: Mapping[str, Any], structure: Structure) -> tuple[str, str, int]:
    """(why the engine makes no stages of a small copy of the model, why ranks share no samples, `merge_tokens`).

    Both reasons are empty where there is none.
    """
    try:
        model, _ = small_model(trained_config(read_config(hf_config, _WHERE)), structure)
        why, places = untrained(model, decoder_of(structure), towers_of(structure).values()), places_of(structure)
        merge_tokens = 0 if why else merge_tokens_of(model, places)  # before the decoder is cut
        return why, why or why_whole(model, places), merge_tokens
    except Exception as error:  # whatever transformers raises for sizes that a class does not expect
        return (why := f"no stage can be tried on a small copy: {reason(error)}"), why, 0


def _medium(processor: MediaProcessor, kind: str, structure: Structure, model: Any) -> tuple[Medium, Encoder | None]:
    """(the medium, its encoder as it runs with it; None: it is refused)."""
    encoder = structure.encoder_of(kind)
    if encoder is None:
        return Medium(kind, f"the model has no encoder for {kind}"), None
    check = check_medium(processor, kind, grid(kind))
    if check.rule is None:
        return Medium(kind, check.problem), None
    pad, needs_values = check.rule.pad, False
    try:
        processor.made(PROBES[kind], pad)
    except Exception:  # whatever a processor raises that looks at values
        needs_values = True
    try:
        texts, items = zip(
            *(processor.made(header, pad, has_values=needs_values) for header in _two(kind)), strict=True
        )
        encoder_lengths(model, encoder, kind, items[0])
        found = encoder if encoder.kinds else traced_encoder(model, encoder, kind, items)
    except Exception as error:  # whatever the model makes of it
        return Medium(kind, f"the model does not take what the processor makes of it: {reason(error)}"), None
    medium = Medium(kind, "", check.rule.way, pad, processor.prompt(kind)[1], needs_values, check.several)
    medium = _with_form(medium, encoder, model, processor, items[0])
    for text, item in zip(texts, items, strict=True):
        num_tokens = sum(n for n in text if isinstance(n, int))
        if medium.form and (num_rows := _num_rows(model, encoder, kind, item)) not in (None, num_tokens):
            why = f"the processor puts {num_tokens} tokens `{pad}` into a text where the model makes {num_rows} rows"
            medium = replace(medium, form="", untrained=f"{why}: processor and config are of different models")
    return medium, found


def _num_rows(model: Any, encoder: Encoder, kind: str, made: Mapping[str, Any]) -> int | None:
    """Rows that training would have of what the processor makes of an item; None where they follow from values."""
    shell, tower = model.get_submodule(encoder.path.rpartition(".")[0]), model.get_submodule(encoder.path)
    # What cannot be counted without values, by whatever error, is left to the check of the model.
    with contextlib.suppress(Exception), recorded(tower, encoder.layers, []), torch.no_grad():
        made_rows = run_encoders(model, kind, made)
        with WithoutValues():  # type: ignore[no-untyped-call]  # torch's is not typed
            return len(rows_of(shell, made_rows))
    return None


def _with_form(
    medium: Medium, encoder: Encoder, model: Any, processor: MediaProcessor, made: Mapping[str, Any]
) -> Medium:
    """The medium with the form of its arrays, if processor and tower agree on one that training knows."""
    if medium.kind == "audio" and processor.sample_rate != SAMPLE_RATE_HZ:
        why = f"its processor takes {processor.sample_rate} samples a second, sounds are decoded to {SAMPLE_RATE_HZ}"
        return replace(medium, untrained=why)
    try:
        form = form_of_item(model.get_submodule(encoder.path.rpartition(".")[0]), medium.kind, made)
    except ConfigError as error:
        return replace(medium, untrained=error.what)
    patch = made[arrays.PIXELS[medium.kind]].shape[1:] if form == arrays.GRID else ()
    return replace(medium, form=form, patch=tuple(map(int, patch)))


def _with_one_form(media: Sequence[Medium]) -> tuple[Medium, ...]:
    """Media of one encoder travel together: in the form of the first, or else clips are not trained on."""
    first = next((of for of in media if of.kind == "image" and of.form), None)
    found = []
    for of in media:
        if first and of.kind == "video" and of.form and (of.form, of.patch) != (first.form, first.patch):
            of = replace(of, form="", untrained=f"its clips come as {of.form}, its pictures as {first.form}")
        found.append(of)
    return tuple(found)


def _two(kind: str) -> tuple[MediaHeader, MediaHeader]:
    """Two items of a kind, one larger than the other."""
    first = PROBES[kind]
    return first, replace(first, width_px=2 * first.width_px, duration_s=2 * first.duration_s)


def traced_encoder(model: Any, encoder: Encoder, kind: str, items: Sequence[Mapping[str, Any]]) -> Encoder:
    """An encoder with the kinds of its layers and what comes before them.

    Args:
        model: On meta.
        encoder: Of the model.
        kind: `image`, `video` or `audio`.
        items: Two: what the processor makes of a prompt with an item.

    Raises:
        Exception: whatever the model raises where it does not take these inputs.
    """
    tower = model.get_submodule(encoder.path)
    if kind != "audio" and form_of(model.get_submodule(encoder.path.rpartition(".")[0])) == GRID:
        tower.config._attn_implementation = watch.PACKED  # as `items.prepare`
    layers, kinds = layers_of(tower, encoder.layers), []
    for _, indices in alike(layers).items():
        first = indices[0]
        runs = [_run(model, encoder, first, kind, item) for item in items]
        (few, short), (many, long) = sorted(runs, key=lambda run: run[0].num_tokens)
        both = Runs((few.num_tokens, many.num_tokens), (short, long), short.flops)
        hidden_size = few.hidden_size
        of = kind_of(layers[first], indices, both, getattr(tower, "config", None), hidden_size)
        calls = _distinct(of.attention) or _stated(layers[first], hidden_size)
        kinds.append(replace(of, attention=calls, degrees=degrees_of(layers[first], DEGREES)))
    return replace(
        encoder,
        kinds=tuple(kinds),
        hidden_size=hidden_size,
        num_input_values=_input_values(model, encoder, kind, items[0]),
    )


def _run(model: Any, encoder: Encoder, index: int, kind: str, item: Mapping[str, Any]) -> tuple[Lengths, watch.Trace]:
    tower, found = model.get_submodule(encoder.path), list[Lengths]()
    layer = layers_of(tower, encoder.layers)[index]
    with recorded(tower, encoder.layers, found, runs=index), watch.traced(layer) as trace:
        run_encoders(model, kind, item)
    return found[0], trace


def _distinct(calls: Sequence[AttentionCall]) -> tuple[AttentionCall, ...]:
    """A layer calls its attention once per sequence or window; all of these are one."""
    return tuple(dict.fromkeys(calls))


def _stated(layer: nn.Module, hidden_size: int) -> tuple[AttentionCall, ...]:
    """The attention of a layer that computes it by itself, by the heads that it states."""
    for module in layer.modules():
        heads = next((n for name in _HEADS if isinstance(n := getattr(module, name, None), int) and n), 0)
        if heads:
            width = hidden_size // heads
            return (AttentionCall(heads, heads, width, width, is_causal=False),)
    return ()


def _input_values(model: Any, encoder: Encoder, kind: str, item: Mapping[str, Any]) -> float:
    """Numbers of 16 bit that everything before the layers keeps of a token."""
    tower, found, kept = model.get_submodule(encoder.path), list[Lengths](), dict[int, torch.Tensor]()
    own = {p.untyped_storage()._cdata for p in (*tower.parameters(), *tower.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not found and (key := tensor.untyped_storage()._cdata) not in own:
            kept[key] = tensor
        return tensor

    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    with recorded(tower, encoder.layers, found), hooks:
        run_encoders(model, kind, item)
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / 2 / found[0].num_tokens
