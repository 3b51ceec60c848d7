"""The trainer of one rank: model, optimizer, engine, feed and checkpoints, put together for its seat in a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflop.config import Config
from dflop.data.tokens import ChatTokenizer
from dflop.errors import TrainError
from dflop.jobs.configured_model import build_stages
from dflop.jobs.sample_source import DatasetSource, make_prefetcher
from dflop.models.build import Stage
from dflop.models.family import TrainableFamily
from dflop.parallel.connect import connect
from dflop.parallel.part import Part
from dflop.parallel.topology import Groups, Seat, make_groups
from dflop.plan.runnable import check_plan
from dflop.records import LLM, Plan, SampleShape
from dflop.run.directory import dataset_ref
from dflop.train.activity import Activities
from dflop.train.checkpoint import Checkpointer
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.fillers import Fillers
from dflop.train.fsdp import shard_parameters
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.plan_source import PlanSource
from dflop.train.stage_edges import Trains
from dflop.train.stages import llm_stage_of, prepare_stages


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank it is, of what."""

    config: Config
    plan: Plan
    seat: Seat
    device: torch.device
    family: TrainableFamily
    tokenizer: ChatTokenizer
    shapes: Sequence[SampleShape]
    frozen: Collection[str] = ()
    """What does not train, in the job's stage of training."""


@dataclass(frozen=True, slots=True)
class _Model:
    """What a rank holds of the model."""

    stages: tuple[Stage, ...]
    sharded: Mapping[str, Part]
    trains: Trains


def make_trainer(
    place: Place, *, settings: LoopSettings, plans: PlanSource, hooks: Hooks, activities: Activities,
    checkpoints: Path | None, on_failed_checkpoint: Callable[[TrainError], None],
) -> Trainer:  # fmt: skip
    """Build what a rank trains with; collective over all ranks.

    Args:
        place: The rank's.
        settings: Of the loop.
        plans: Where StepPlans come from.
        hooks: What the loop tells.
        activities: Where threads note what they do.
        checkpoints: Folder; None: nothing is saved or resumed.
        on_failed_checkpoint: Told of one that could not be written.

    Raises:
        ConfigError: the plan or the configuration asks for what the model cannot do.
    """
    config, plan, seat, device = place.config, place.plan, place.seat, place.device
    check_plan(plan, place.family.specs())
    groups = make_groups(plan, seat.rank, timeout_s=config.train.timeout_s)
    if device.type == "cuda":  # gloo has connected all ranks by now
        connect(groups, plan, device)
    model = _model(place, groups)
    optimizer = make_optimizer(
        plan, seat, model.stages, groups, model.sharded,
        OptimizerSettings(config.train.learning_rate, config.train.weight_decay),
    )  # fmt: skip
    source = DatasetSource(dataset_ref(config), place.family, place.shapes)
    checkpointer = None
    if checkpoints is not None:
        checkpointer = Checkpointer(
            checkpoints, model.stages, optimizer, groups, model.sharded, keep=config.train.keep_checkpoints,
            on_failure=on_failed_checkpoint,
        )  # fmt: skip
    fillers = None
    if config.train.shard_parameters:
        fillers = Fillers(source, place.family, plan, seat, llm_stage_of(model.stages))
    return Trainer(
        settings=settings,
        plan=plan,
        seat=seat,
        stages=model.stages,
        sharded=model.sharded,
        groups=groups,
        engine=_engine(place, model, groups, activities),
        feed=_feed(place, model, source, activities),
        source=source,
        plans=plans,
        optimizer=optimizer,
        hooks=hooks,
        checkpointer=checkpointer,
        activities=activities,
        fillers=fillers,
    )


def _model(place: Place, groups: Groups) -> _Model:
    config, plan, seat = place.config, place.plan, place.seat
    stages, sharded = build_stages(config, place.family, place.tokenizer, seat, groups.tensor, place.device)
    trains = prepare_stages(stages, plan, seat, place.family, frozen=place.frozen)
    if config.train.shard_parameters:
        sharded = {**sharded, **shard_parameters(stages, plan, seat, groups)}
    return _Model(stages, sharded, trains)


def _engine(place: Place, model: _Model, groups: Groups, activities: Activities) -> Engine:
    hidden_size = next(s.hidden_size for s in place.family.specs() if s.module == LLM)
    return Engine(
        place.plan,
        place.seat,
        model.stages,
        groups,
        place.device,
        hidden_size=hidden_size,
        row_width=hidden_size * (1 + place.family.decoder.num_deep_features),
        trains=model.trains,
        activity=activities.main,
    )


def _feed(place: Place, model: _Model, source: DatasetSource, activities: Activities) -> Feed:
    return Feed(
        source,
        place.family,
        place.plan,
        place.seat,
        llm_stage_of(model.stages),
        prefetcher=make_prefetcher(place.config, source, place.device),
        activity=activities.feed,
        dtype=getattr(torch, place.config.model.dtype),
        pins=place.device.type == "cuda",
    )
