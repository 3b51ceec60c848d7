"""The stages of one rank, ready to train: cut for its seat, shared out over its tensor-parallel group, and filled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from dflop.errors import ConfigError
from dflop.models.build import EncoderStage, Stage, cut_stages
from dflop.models.family import Family, tower_of
from dflop.models.ways import Way, apply_way
from dflop.models.weights import Weights, materialise
from dflop.parallel.part import Part
from dflop.parallel.tensor import shard_stage
from dflop.parallel.topology import Seat
from dflop.records import Plan
from dflop.train.routes import Trains


def make_stages(
    model: nn.Module, family: Family, seat: Seat, tensor_group: dist.ProcessGroup | None
) -> tuple[tuple[Stage, ...], dict[str, Part]]:
    """Stages of a seat, one per part, and what the rank holds of the parameters that it does not hold whole.

    Args:
        model: Full model, the same on every rank; what the seat does not hold is let go of.
        family: Of the model.
        seat: The rank's place.
        tensor_group: Its tensor-parallel ranks; None: it is alone.

    Raises:
        ConfigError: the model cannot be cut or shared as the plan wants it.
    """
    stages = cut_stages(model, family, [(part.module, part.layers) for part in seat.parts])
    sharded: dict[str, Part] = {}
    if tensor_group is not None and tensor_group.size() > 1:
        for stage in stages:
            sharded |= shard_stage(stage, tensor_group)
    return stages, sharded


def fill_stages(
    stages: Iterable[Stage], parts: Mapping[str, Part], weights: Weights, device: torch.device
) -> None:  # fmt: skip
    """Give empty stages memory on a device, and weights.

    Args:
        stages: Of a model made by `build_empty`, cut and shared out.
        parts: What the rank holds of the parameters that it does not hold whole.
        weights: Of the model; files keep their types, stages that of the model.
        device: Where parameters are to be.

    Raises:
        ConfigError: a file cannot be read.
    """
    for stage in stages:
        made = materialise(stage, device)
        stage.names = {name: made.get(p, p) for name, p in stage.names.items()}
        for name, p in stage.names.items():
            part = parts.get(name)
            given = weights.read(name, part.axis, part.ranges) if part else weights.read(name)
            p.detach().copy_(given)


def prepare_stages(stages: Sequence[Stage], plan: Plan, seat: Seat, *, frozen: Collection[str]) -> Trains:
    """Set a rank's stages up to run as the plan and the configuration say.

    Args:
        stages: One per part of the seat.
        plan: Says whose layers run again in the backward pass, or send to the host what they save.
        seat: The rank's place.
        frozen: Modules whose weights do not train, or `<encoder>.tower`s; those that the plan lacks are passed over, as
            the data may have nothing for an encoder.

    Returns:
        Which modules train on which stages. It follows from the arguments that all ranks share, not from the stages,
        so that both ends of every message agree on whether a gradient comes back.

    Raises:
        ConfigError: no module trains, or recomputation is planned for a module that cannot do it.
    """
    if all(module.module in frozen for module in plan.modules):
        raise ConfigError("every module is frozen: there is nothing to train", where="model.frozen")
    for part, stage in zip(seat.parts, stages, strict=True):
        module = plan.module(part.module)
        num_recomputed = module.recomputed[seat.stage] if module.recomputed else None
        num_offloaded = module.offloaded[seat.stage] if module.offloaded else 0
        way = Way(is_frozen=part.module in frozen, recompute=module.recompute)
        apply_way(stage, way, num_recomputed, num_offloaded)
        if part.module not in frozen and tower_of(part.module) in frozen:
            assert isinstance(stage, EncoderStage)
            stage.freeze_tower()
    return {
        (module.module, number): num_layers > 0 and module.module not in frozen
        for module in plan.modules
        for number, num_layers in enumerate(module.layers_per_stage)
    }
