"""The trainer of one rank: model, optimizer, engine, feed and checkpoints, put together for its seat in a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from dflop.config import Config
from dflop.data.tokens import ChatTokenizer
from dflop.errors import TrainError
from dflop.jobs.configured_model import first_weights
from dflop.jobs.sample_source import DatasetSource, make_prefetcher
from dflop.models import attention
from dflop.models.family import Family
from dflop.parallel.topology import Seat, connect, make_groups
from dflop.plan.runnable import check_plan
from dflop.records import LLM, Plan, SampleShape
from dflop.run.directory import dataset_ref
from dflop.run.messages import say
from dflop.train.checkpoint import Checkpointer
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.liveness import Activities
from dflop.train.loop import Hooks, LoopSettings, Trainer
from dflop.train.optim import OptimizerSettings
from dflop.train.plan_source import PlanSource
from dflop.train.stages import apply_plan


def make_trainer(
    config: Config, plan: Plan, seat: Seat, device: torch.device, family: Family, tokenizer: ChatTokenizer,
    shapes: Sequence[SampleShape], *, frozen: Collection[str], settings: LoopSettings, plans: PlanSource, hooks: Hooks,
    activities: Activities, checkpoints: Path | None, on_failed_checkpoint: Callable[[TrainError], None],
) -> Trainer:  # fmt: skip
    """Build what a rank trains with; collective over all ranks. Without `checkpoints` nothing is saved or resumed.

    Raises:
        ConfigError: the plan or the configuration asks for what the model cannot do.
    """
    check_plan(plan, family.specs())
    llm = next(spec for spec in family.specs() if spec.module == LLM)
    groups = make_groups(plan, seat.rank, timeout_s=config.train.timeout_s, is_tied=llm.is_tied)
    if device.type == "cuda":  # gloo has connected all ranks by now
        connect(groups, plan, device)
    kernel = attention.resolve(config.model.attention, device.type, getattr(torch, config.model.dtype))
    if seat.rank == 0:
        say(f"attention: {kernel}")
    model, weights = first_weights(config, family, tokenizer)
    rates = OptimizerSettings(config.train.learning_rate, config.train.weight_decay)
    made = apply_plan(
        model, family, plan, seat, groups, device, kernel=kernel, rates=rates, frozen=frozen, weights=weights
    )
    source = DatasetSource(dataset_ref(config), family, shapes)
    stage_of = {part.module: stage for part, stage in zip(seat.parts, made.stages, strict=True)}
    checkpointer = None
    if checkpoints is not None:
        keep, on_failure = config.train.keep_checkpoints, on_failed_checkpoint
        checkpointer = Checkpointer(
            checkpoints, made.stages, made.optimizer, groups, made.parts, keep=keep, on_failure=on_failure
        )
    engine = Engine(
        plan, seat, made.stages, groups, device, hidden_size=llm.hidden_size,
        row_width=llm.hidden_size * (1 + family.decoder.num_deep_features), trains=made.trains,
        activity=activities.main,
    )  # fmt: skip
    feed = Feed(
        source, family, plan, seat, stage_of, prefetcher=make_prefetcher(config, source, device.type),
        activity=activities.feed, dtype=getattr(torch, config.model.dtype), pins=device.type == "cuda",
        fills=groups.shards is not None,
    )  # fmt: skip
    return Trainer(
        settings=settings,
        plan=plan,
        seat=seat,
        groups=groups,
        engine=engine,
        feed=feed,
        source=source,
        plans=plans,
        reducer=made.reducer,
        optimizer=made.optimizer,
        hooks=hooks,
        checkpointer=checkpointer,
        activities=activities,
    )
