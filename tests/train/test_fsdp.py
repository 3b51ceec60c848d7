"""Replicas that share out parameters (FSDP2) train as those that hold all of them; gradients: `test_parity.py`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dflop.records import LLM
from dflop.train.fsdp import sharded_modules
from tests.train.parity import Omni
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_inline_plan, make_step_plan, sharing

IMAGES = Omni(("image", "video"), num_steps=2, batch_size=6)


def train(rank, folder, shard, dtype):
    """Two optimizer steps on two replicas: (norm, weights by rows, what was held)."""
    plan = sharing(make_inline_plan([{"vision": 2, LLM: 4}], dp=2, num_microbatches=3), 2 if shard else 0)
    model = IMAGES.build().to(dtype)
    whole = {n: tuple(p.shape) for n, p in model.named_parameters()}
    it = Rank(rank, plan, IMAGES.family, model, weight_decay=0.1)
    for step, batch in enumerate(IMAGES.batches):
        step_plan = make_step_plan(plan, batch, step)
        norm, _ = it.update(it.step(SyntheticSource(batch), batch, step_plan), 1e-2, max_norm=1.0)
    are_shards = [isinstance(p, DTensor) for stage in it.stages for p in stage.parameters()]
    held = {n: p.detach().clone() for n, p in it.names.items()}
    return norm, held, whole, it.parts, are_shards, {n: set(s) for n, s in it.optimizer.state().items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of `train` by its arguments."""

    @cache
    def run(shard, dtype):
        return run_ranks(train, 2, tmp_path_factory.mktemp("fsdp"), shard, dtype)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_weights_equal_those_of_whole_replicas(runs, dtype):
    whole, sharded = runs(False, dtype)[0], runs(True, dtype)
    assert sharded[0][0] == pytest.approx(whole[0], rel=1e-5)
    assert not any("master" in keys for *_, state in sharded for keys in state.values())
    for name, want in whole[1].items():
        rows = torch.cat([rank[1][name] for rank in sharded])
        assert rows.dtype == torch.float32
        if dtype == torch.float32:
            # AdamW divides by the size of a gradient, so that of a tiny one is no better than its sign.
            torch.testing.assert_close(rows, want, rtol=1e-4, atol=2e-4, msg=name)
        else:
            torch.testing.assert_close(rows.bfloat16(), want, rtol=1e-2, atol=1e-3, msg=name)


def test_a_rank_keeps_its_rows_and_nothing_else(runs):
    for rank, (_, held, whole, parts, are_shards, state) in enumerate(runs(True, torch.float32)):
        assert are_shards
        assert all(are_shards), "gathered weights outlived the step"
        assert set(state) == set(held) == set(parts)
        for name, p in held.items():
            ((first, end),) = parts[name].ranges
            assert (parts[name].shape, parts[name].axis) == (whole[name], 0)
            assert tuple(p.shape) == (end - first, *whole[name][1:])
            half = -(-whole[name][0] // 2)
            assert (first, end) == ((0, half), (half, whole[name][0]))[rank]


class NotedGather:
    """torch's own all-gather, which notes when it begins."""

    def __init__(self, events):
        self._events = events

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self._events.append("gather")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def layers_with_prefetch(rank, folder):
    """Of every backward pass, layers that run while the next one's weights come; by order of passes."""
    plan = sharing(make_inline_plan([{"vision": 2, LLM: 4}], dp=2, num_microbatches=3), 2)
    it = Rank(rank, plan, IMAGES.family, IMAGES.build())
    stage, tokens, found = it.stage_of[LLM], torch.arange(8), {}
    events, in_flight = [], []
    for unit in sharded_modules(stage):
        unit.set_custom_all_gather(NotedGather(events))
    for layer in stage.layers:
        layer.mlp.register_full_backward_pre_hook(lambda *_: events.append("layer"))
    for order in ("FBFBFB", "FFBFBB", "FFFBBB"):
        found[order] = []
        for action in order:
            if action == "F":
                hidden = stage.embed(tokens, [], [])
                in_flight.append(stage(hidden, stage.positions(tokens, []), torch.tensor([0, 8], dtype=torch.int32)))
                continue
            events.clear()
            in_flight.pop(0).sum().backward()
            gathers = [events[:i].count("gather") for i, event in enumerate(events) if event == "layer"]
            needed = [gathers[-1] - n for n in reversed(range(len(gathers)))]
            found[order].append(sum(begun > n for begun, n in zip(gathers, needed, strict=True)))
    return found


def test_weights_of_the_next_layer_come_while_a_layer_runs_back_in_every_order_of_a_pipeline(tmp_path):
    for found in run_ranks(layers_with_prefetch, 2, tmp_path):
        assert found == {key: [3, 3, 3] for key in ("FBFBFB", "FFBFBB", "FFFBBB")}, "3 of 4 layers have a next one"
