"""Replicas that share out parameters (FSDP2) get the gradients of replicas that hold all of them."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflop.errors import ConfigError
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.fillers import Fillers
from dflop.train.fsdp import shard_parameters
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.reduce import GradientReducer
from dflop.train.stages import llm_stage_of, make_stages, prepare_stages
from tests.train import synthetic
from tests.train.parity import Omni, Trial, assert_equal_steps, reference, run_trial
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_inline_plan, make_plan, make_step_plan

IMAGES = Omni(("image", "video"))
MEDIA, TIED = Omni(), Omni(tied=True)
ONE_STAGE = [{"vision": 2, "audio": 2, LLM: 4}]
MIXED = [{"vision": 2, "audio": 1}, {"audio": 1, LLM: 4}]
TRIALS = {
    "inline dp2": (make_inline_plan(ONE_STAGE, dp=2, num_microbatches=4), MEDIA, (), ()),
    "inline dp2, tied": (make_inline_plan(ONE_STAGE, dp=2, num_microbatches=4), TIED, (), ()),
    "inline dp4": (make_inline_plan(ONE_STAGE, dp=4, num_microbatches=3), MEDIA, (), ()),
    "inline dp2, recomputed": (make_inline_plan(ONE_STAGE, dp=2, num_microbatches=4), MEDIA, ("vision", LLM), ()),
    "inline dp2, vision frozen": (make_inline_plan(ONE_STAGE, dp=2, num_microbatches=4), MEDIA, (), ("vision",)),
    "inline dp2, llm frozen": (make_inline_plan(ONE_STAGE, dp=2, num_microbatches=4), MEDIA, (), (LLM,)),
    "inline dp2, towers frozen": (
        make_inline_plan(ONE_STAGE, dp=2, num_microbatches=4), MEDIA, (LLM,), ("vision.tower", "audio.tower"),
    ),
    "inline pp2 dp2, projectors alone train": (
        make_inline_plan(MIXED, dp=2, num_microbatches=4), MEDIA, (), ("vision.tower", "audio.tower", LLM),
    ),
    "inline pp2 dp2, mixed stages": (make_inline_plan(MIXED, dp=2, num_microbatches=4), MEDIA, (), ()),
    "inline pp2 dp2, tied ends": (
        make_inline_plan([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], dp=2, num_microbatches=4), TIED, (), (),
    ),
    "vision dp2 + llm dp2": (make_plan({"vision": (1, 2), LLM: (1, 2)}, num_microbatches=4), IMAGES, (), ()),
    "vision dp2 + llm pp2": (make_plan({"vision": (1, 2), LLM: (2, 1)}, num_microbatches=4), IMAGES, (LLM,), ()),
}  # fmt: skip
"""Plan, subject, modules that recompute, modules that are frozen."""

cached_reference = cache(reference)


@pytest.mark.parametrize("name", TRIALS)
def test_gradients_equal_hugging_face(name, tmp_path):
    plan, subject, recompute, frozen = TRIALS[name]
    modules = (dataclasses.replace(m, recompute=m.module in recompute) for m in plan.modules)
    plan = dataclasses.replace(plan, modules=tuple(modules))
    step_plans = tuple(make_step_plan(plan, batch, step, idle=True) for step, batch in enumerate(subject.batches))
    ranks = run_trial(Trial(subject, plan, step_plans, frozen, shard_parameters=True), tmp_path)
    assert_equal_steps(ranks, cached_reference(subject, frozen=frozen))


class Sums(TorchDispatchMode):
    """Counts sums over replicas that leave each of them its rows."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.name().startswith("c10d::_reduce_scatter")
        return op(*args, **(kwargs or {}))


def train(rank, folder, shard, dtype, num_microbatches):
    """Two optimizer steps on two replicas: (weights by rows, what was held and exchanged)."""
    plan = make_inline_plan([{"vision": 2, LLM: 4}], dp=2, num_microbatches=num_microbatches)
    seat = seat_of(plan, rank)
    groups = make_groups(plan, rank, timeout_s=60)
    stages, sharded = make_stages(IMAGES.build().to(dtype), IMAGES.family, seat, groups.tensor)
    trains = prepare_stages(stages, plan, seat, IMAGES.family, frozen=())
    whole = {n: tuple(p.shape) for stage in stages for n, p in stage.names.items()}
    parts = shard_parameters(stages, plan, seat, groups) if shard else {}
    size = synthetic.HIDDEN_SIZE
    engine = Engine(plan, seat, stages, groups, torch.device("cpu"), hidden_size=size, row_width=size, trains=trains)
    optimizer = make_optimizer(plan, seat, stages, groups, sharded, OptimizerSettings(1e-2, 0.1))
    reducer = GradientReducer(plan, seat, stages, groups, sharded, owners=optimizer.owners)
    counts = []
    for step, batch in enumerate(IMAGES.batches[:2]):
        given = SyntheticSource(batch), IMAGES.family, plan, seat, llm_stage_of(stages)
        prepared = Feed(*given).prepare(make_step_plan(plan, batch, step))
        prepared = Fillers(*given).fill(prepared) if shard else prepared
        tokens = sum(s.num_supervised_tokens for s in batch)
        with Sums() as seen:
            engine.run(prepared.microbatches, healthy=torch.ones(len(batch), dtype=torch.bool), num_loss_tokens=tokens)
        counts.append(seen.count)
        reducer.reduce()
        norm, _ = reducer.norm_and_loss(0.0)
        reducer.clip(norm, 1.0)
        optimizer.step(1e-2)
        optimizer.zero_grad()
    are_shards = [isinstance(p, DTensor) for stage in stages for p in stage.parameters()]
    held = {n: p.detach().clone() for stage in stages for n, p in stage.names.items()}
    return norm, held, whole, parts, are_shards, counts, {n: set(s) for n, s in optimizer.state().items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of `train` by its arguments."""

    @cache
    def run(shard, dtype, num_microbatches=4):
        return run_ranks(train, 2, tmp_path_factory.mktemp("fsdp"), shard, dtype, num_microbatches)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_weights_equal_those_of_whole_replicas(runs, dtype):
    whole, sharded = runs(False, dtype)[0], runs(True, dtype)
    assert sharded[0][0] == pytest.approx(whole[0], rel=1e-5)
    for name, want in whole[1].items():
        rows = torch.cat([rank[1][name] for rank in sharded])
        assert rows.dtype == torch.float32
        if dtype == torch.float32:
            # AdamW divides by the size of a gradient, so that of a tiny one is no better than its sign.
            torch.testing.assert_close(rows, want, rtol=1e-4, atol=2e-4, msg=name)
        else:
            torch.testing.assert_close(rows.bfloat16(), want, rtol=1e-2, atol=1e-3, msg=name)


def test_a_rank_keeps_its_rows_and_nothing_else(runs):
    for rank, (_, held, whole, parts, are_shards, _, state) in enumerate(runs(True, torch.float32)):
        assert are_shards
        assert all(are_shards), "gathered weights outlived the step"
        assert set(state) == set(held) == set(parts)
        for name, p in held.items():
            ((first, end),) = parts[name].ranges
            assert (parts[name].shape, parts[name].axis) == (whole[name], 0)
            assert tuple(p.shape) == (end - first, *whole[name][1:])
            half = -(-whole[name][0] // 2)
            assert (first, end) == ((0, half), (half, whole[name][0]))[rank]


def test_bfloat16_weights_are_float32_where_they_are_updated(runs):
    for _, held, *_, state in runs(True, torch.bfloat16):
        assert {p.dtype for p in held.values()} == {torch.float32}
        assert not any("master" in keys for keys in state.values())


def test_gradients_are_summed_once_per_step_however_many_microbatches(runs):
    few, many = (runs(True, torch.float32, n) for n in (2, 4))
    for rank in (0, 1):
        assert few[rank][5] == many[rank][5] == many[0][5]
        assert many[rank][5][0] > 0


def test_tensor_parallelism_is_refused():
    plan = make_plan({LLM: (1, 1, 2)}, num_microbatches=1)
    with pytest.raises(ConfigError, match="tensor-parallel") as caught:
        shard_parameters((), plan, seat_of(plan, 0), None)
    assert caught.value.where == "train.shard_parameters"
