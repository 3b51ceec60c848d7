"""Ways of running a module, each with a cost of its own: with weights that train, with frozen ones, with recomputation.

A frozen module still hands gradients through where its input needs them (an LLM above a trained encoder); a frozen
encoder has nothing below it, so it runs no backward at all and keeps nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from dflop.errors import ConfigError
from dflop.models.offload import Offload, spread

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Way:
    """How a module is run; the fields are those of `Measurement`."""

    is_frozen: bool = False
    recompute: bool = False

    @property
    def name(self) -> str:
        """`train`, `frozen`, `recompute` or `frozen+recompute`."""
        return "+".join(w for w, on in (("frozen", self.is_frozen), ("recompute", self.recompute)) if on) or "train"


TRAIN = Way()
WAYS = {way.name: way for way in (TRAIN, Way(is_frozen=True), Way(recompute=True))}
"""The ways a configuration may name."""


@dataclass(slots=True)
class Reruns:
    """How many of the layers that may run again in the backward pass do so, the first ones, from now on."""

    num_layers: int


def apply_way(stage: nn.Module, way: Way, num_recomputed: int | None = None, num_offloaded: int = 0) -> Reruns:
    """Set a stage up to run in one way; undo by building it again.

    Args:
        stage: An encoder or decoder stage in training mode.
        way: What to set.
        num_recomputed: Of the layers, where the way recomputes, how many of the first ones may; None: all.
        num_offloaded: Of the layers, how many keep what they save on the host, spread over the stage; those that
            recompute are the first of the others.

    Returns:
        With it forward passes may differ in how many layers run again; all that may do, until it says otherwise.

    Raises:
        ConfigError: either is asked for and no layer of the stage supports it.
    """
    if way.is_frozen:
        stage.requires_grad_(False)
    layers = [m for m in stage.modules() if _is_checkpointable(m)] or getattr(stage, "layers", [])
    host, sent = Offload(), spread(len(layers), num_offloaded)
    for place in sent:
        _run_by(layers[place], functools.partial(host.run, layers[place], place))
    captured = getattr(stage, "captured", lambda forward: forward)
    others = [layer for place, layer in enumerate(layers) if place not in sent][:num_recomputed]
    reruns = Reruns(len(others))
    for number, layer in enumerate(others if way.recompute else ()):
        _run_by(layer, functools.partial(_run_again, reruns, number, draws(layer), captured))
    if not layers and (num_offloaded or (way.recompute and num_recomputed != 0)):
        raise ConfigError(
            f"no layer of {type(stage).__name__} can be recomputed", hint="run this module without `recompute`"
        )
    return reruns


def _run_again(
    reruns: Reruns, number: int, is_random: bool, captured: Callable[[Forward], Forward], forward: Forward, *args: Any
) -> Any:
    """What `forward` returns; it runs again in the backward pass if the layer is among the first that do."""
    if number >= reruns.num_layers:
        return forward(*args)
    return checkpoint(captured(forward), *args, use_reentrant=False, preserve_rng_state=is_random)


def _run_by(layer: Any, run: Callable[..., Any]) -> None:
    """Let a layer keep for its backward pass what `run(forward, hidden, ...)` lets it keep.

    transformers marks the layers for which this is safe by a base class, and wraps their forward. Only the switch and
    the function are set here, per layer, so it works on a stage that was cut out of its model. A tower that is one
    layer has no such base: its forward is wrapped here.
    """
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = run
    if not _is_checkpointable(layer):
        forward = layer.forward
        layer.forward = lambda *args, **given: run(functools.partial(forward, **given), *args)


def draws(layer: nn.Module) -> bool:
    """Whether dropout of some kind draws random numbers: only then must a second forward pass draw the same ones.

    To keep a generator's state and to set it takes the host longer than to launch a kernel, for every layer.
    """
    return any(
        isinstance(value, float) and value > 0
        for module in layer.modules()
        for name, value in vars(module).items()
        if "drop" in name or (name == "p" and "Drop" in type(module).__name__)
    )


def _is_checkpointable(module: nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
