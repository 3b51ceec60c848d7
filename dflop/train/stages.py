"""What one rank trains: its stages, set up as the plan says, with optimizer and reducer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.build import Stage
from dflop.models.family import Family, tower_of
from dflop.models.low_rank import is_adapted
from dflop.models.ways import Way
from dflop.models.weights import Weights
from dflop.parallel.compiled import EAGER
from dflop.parallel.part import Part
from dflop.parallel.stages import Piece, build_stages
from dflop.parallel.topology import Groups, Seat
from dflop.records import FP8_OFF, LLM, Plan
from dflop.train.fsdp import shard_parameters, sharded_modules
from dflop.train.optim import Optimizer, OptimizerSettings, make_optimizer
from dflop.train.reduce import GradientReducer
from dflop.train.routes import Trains


@dataclass(frozen=True, slots=True)
class RankModel:
    """What one rank trains, and where."""

    plan: Plan
    seat: Seat
    groups: Groups
    device: torch.device
    stages: tuple[Stage, ...]
    """One per part of the seat."""
    parts: Mapping[str, Part]
    """What the rank holds of the parameters that it does not hold whole, by global name."""
    trains: Trains
    """Which modules train on which stages, the same on every rank."""
    hidden_size: int
    """Hidden size of the LLM."""
    row_width: int
    """Width of rows that encoders hand to the LLM; the hidden size unless deep features come with it."""
    optimizer: Optimizer
    reducer: GradientReducer


def apply_plan(
    model: nn.Module, family: Family, plan: Plan, seat: Seat, groups: Groups, device: torch.device, *, kernel: str,
    rates: OptimizerSettings, frozen: Collection[str] = (), weights: Weights | None = None, compiler: str = EAGER,
    fp8: str = FP8_OFF,
) -> RankModel:  # fmt: skip
    """Make of a whole model what a seat trains; the order is that of `build_stages`, then FSDP2, optimizer, reducer.

    FSDP2 comes before the optimizer, which updates rows; the optimizer, whose owners the reducer sums gradients for,
    before the reducer, which puts the gradients of the final parameters into its buffers.

    Args:
        model: Full model, the same on every rank; what the seat does not hold is let go of.
        family: Of the model.
        plan: The layout.
        seat: The rank's place.
        groups: Process groups.
        device: Of the rank.
        kernel: Of attention, as `attention.resolve` returned it.
        rates: Of AdamW.
        frozen: Modules whose weights do not train, or `<encoder>.tower`s; those that the plan lacks are passed over, as
            the data may have nothing for an encoder.
        weights: Of a model that has no memory yet.
        compiler: Of the layers of all modules: a backend of `torch.compile`.
        fp8: Recipe of the Linears in the LLM's layers, as of `use_float8`.

    Raises:
        ConfigError: as `pieces_of` and `build_stages`, or the model has adapters and ranks are to share its experts.
    """
    if (ep := plan.module(LLM).parallel.ep) > 1 and any(is_adapted(part) for part in model.modules()):
        raise ConfigError(
            f"the model has adapters, which need its experts whole, and the plan shares them over ep {ep} ranks",
            where="train.lora", hint="plan again with plan.expert_parallel=[1]",
        )  # fmt: skip
    stages, cut = build_stages(
        model, family, pieces_of(plan, seat, frozen, compiler, fp8), device, kernel=kernel, group=groups.tensor,
        experts=groups.experts, weights=weights,
    )  # fmt: skip
    parts = cut | shard_parameters(stages, groups, cut)
    optimizer = make_optimizer(plan, seat, stages, groups, rates)
    reducer = GradientReducer(plan, seat, stages, groups, cut, owners=optimizer.owners)
    hidden = int(family.configs[LLM]["hidden_size"])
    width, trains = hidden * (1 + family.decoder.num_deep_features), _trains(plan, frozen)
    return RankModel(plan, seat, groups, device, stages, parts, trains, hidden, width, optimizer, reducer)


def pieces_of(
    plan: Plan, seat: Seat, frozen: Collection[str] = (), compiler: str = EAGER, fp8: str = FP8_OFF
) -> list[Piece]:
    """What a seat runs, one piece per part; `frozen`, `compiler` and `fp8` as for `apply_plan`.

    Raises:
        ConfigError: no module trains, or experts that are shared do not.
    """
    if all(module.module in frozen for module in plan.modules):
        raise ConfigError("every module is frozen: there is nothing to train", where="model.frozen")
    if LLM in frozen and plan.module(LLM).parallel.ep > 1:
        raise ConfigError(
            f"`{LLM}` is frozen and shares its experts over ep {plan.module(LLM).parallel.ep} ranks",
            where="model.frozen", hint="plan again with ep = 1: a frozen LLM runs no backward pass of text alone",
        )  # fmt: skip
    pieces = []
    for part in seat.parts:
        module, is_frozen = plan.module(part.module), part.module in frozen
        piece = Piece(
            part.module,
            part.layers,
            Way(is_frozen=is_frozen, recompute=module.recompute),
            num_recomputed=None if (n := module.num_recomputed) == module.layers_per_stage else n[seat.stage],
            num_offloaded=module.offloaded[seat.stage] if module.offloaded else 0,
            trains_projector_only=not is_frozen and tower_of(part.module) in frozen,
            compiler=compiler,
            fp8=fp8 if part.module == LLM else FP8_OFF,
        )
        pieces.append(piece)
    return pieces


@contextmanager
def mode(stages: Collection[Stage], *, is_training: bool) -> Iterator[None]:
    """Gradients and training mode, in which stages are built, or neither; evaluation ends with weights resharded."""
    for stage in () if is_training else stages:
        stage.eval()
    with torch.set_grad_enabled(is_training):
        yield
    for stage in () if is_training else stages:
        stage.train()
        for module in sharded_modules(stage):
            module.reshard()  # what a backward pass would let go of


def _trains(plan: Plan, frozen: Collection[str]) -> Trains:
    """Which modules train on which stages.

    It follows from what all ranks share, not from their stages, so that both ends of every message agree on whether a
    gradient comes back.
    """
    return {
        (module.module, number): num_layers > 0 and module.module not in frozen
        for module in plan.modules
        for number, num_layers in enumerate(module.layers_per_stage)
    }
