"""Stages on their device, ready to run: the one order in which training, its tests and probes set a module up.

1. cut: a rank keeps the layers of its pieces and lets go of the rest of the model; those that will be compiled get
   transformers' own norms and MLPs back;
2. share: tensor-parallel ranks keep a part each, and expert-parallel ones some experts, so that no rank ever holds
   more than its own;
3. fill: memory on the device, and weights, for a model that was built without;
4. use: the attention kernel;
5. way: what is frozen, recomputed or kept on the host, of the layers as they are now; which Linears multiply in FP8;
6. compile: the layers themselves, within what the way put around them.

What training adds (FSDP2, optimizer, reducer) follows in `dflop/train/stages.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from dflop.models import attention
from dflop.models.build import EncoderStage, Stage, cut_stages
from dflop.models.family import Family
from dflop.models.float8 import use_float8
from dflop.models.fused import unfuse
from dflop.models.ways import TRAIN, Way, apply_way
from dflop.models.weights import Weights, materialise
from dflop.parallel.compiled import EAGER, check_compilable, compile_layers
from dflop.parallel.experts import share_experts
from dflop.parallel.part import Part
from dflop.parallel.tensor import shard_stage
from dflop.records import FP8_OFF


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank runs of one module, and how."""

    module: str
    layers: tuple[int, int]
    """`[first, end)`."""
    way: Way = TRAIN
    num_recomputed: int | None = None
    """Recomputed layers, where the way recomputes; None: all."""
    num_offloaded: int = 0
    """Layers that keep what they save on the host."""
    trains_projector_only: bool = False
    """Whether an encoder's projector trains alone."""
    compiler: str = EAGER
    """Compiler of its layers: a backend of `torch.compile`."""
    fp8: str = FP8_OFF
    """Recipe of its layers' Linears, as of `use_float8`."""


def build_stages(
    model: nn.Module, family: Family, pieces: Sequence[Piece], device: torch.device, *, kernel: str,
    group: dist.ProcessGroup | None = None, experts: dist.ProcessGroup | None = None, weights: Weights | None = None,
) -> tuple[tuple[Stage, ...], dict[str, Part]]:  # fmt: skip
    """A stage per piece, and what the rank holds of the parameters that it does not hold whole, by global name.

    Args:
        model: Full model, the same on every rank; what no piece holds is let go of.
        family: Of the model.
        pieces: What the rank runs.
        device: Where stages are to be.
        kernel: Of attention, as `attention.resolve` returned it.
        group: Ranks that share the layers of every piece; None: this rank is alone.
        experts: Ranks that share the experts of every layer; None: this rank has all.
        weights: Of a model that has no memory yet; files keep their types, stages that of the model.

    Raises:
        ConfigError: the model cannot be cut, shared, recomputed, compiled or run in FP8 as it is wanted, or a file
            cannot be read.
    """
    stages = cut_stages(model, family, [(piece.module, piece.layers) for piece in pieces])
    for stage in (stage for stage, piece in zip(stages, pieces, strict=True) if piece.compiler):
        check_compilable(stage.layers)
        unfuse(stage.layers)
    parts: dict[str, Part] = {}
    if group is not None:
        for stage in stages:
            parts |= shard_stage(stage, group)
    if experts is not None:
        for stage in stages:
            parts |= share_experts(stage, experts)
    if weights is not None:
        _fill(stages, parts, weights, device)
    for stage, piece in zip(stages, pieces, strict=True):
        stage.to(device)
        attention.use(stage, kernel)
        stage.reruns = apply_way(stage, piece.way, piece.num_recomputed, piece.num_offloaded)
        if piece.trains_projector_only:
            assert isinstance(stage, EncoderStage)
            stage.freeze_tower()
        if piece.fp8 != FP8_OFF:
            use_float8(stage.layers, piece.fp8, device)
        if piece.compiler:
            compile_layers(stage.layers, piece.compiler)
    return stages, parts


def _fill(stages: Iterable[Stage], parts: Mapping[str, Part], weights: Weights, device: torch.device) -> None:
    for stage in stages:
        made = materialise(stage, device)
        stage.names = {name: made.get(p, p) for name, p in stage.names.items()}
        for name, p in stage.names.items():
            part = parts.get(name)
            given = weights.read(name, part.axis, part.ranges) if part else weights.read(name)
            p.detach().copy_(given)
