"""Round trips: whatever plan wrote a checkpoint, whatever plan loads it, every tensor is the same."""

from __future__ import annotations

import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dflop.parallel.part import even_part, rows_part
from dflop.records import LLM
from dflop.train import buckets
from dflop.train.blocks import BlockLoadPlanner, BlockSavePlanner, BlockWriter, SafeReader, blocks_of
from dflop.train.checkpoint import Checkpointer
from dflop.train.checkpoint_state import read_model
from tests.models.generic.small import Small
from tests.models.whole_model import build_model
from tests.train import synthetic
from tests.train.rank import Rank, weights_come_late
from tests.train.ranks import run_ranks
from tests.train.synthetic import ALL, family, make_inline_plan, make_plan, sharing, sharing_optimizer

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
PLANS = {
    "one process": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=1),
    "split pp2": make_plan({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, num_microbatches=1),
    "split tp2 pp2": make_plan({"vision": (1, 1, 2), "audio": (1, 1), LLM: (2, 1, 2)}, num_microbatches=1),
    "split dp2": make_plan({"vision": (1, 2), "audio": (1, 1), LLM: (1, 2)}, num_microbatches=1),
    "inline pp2 tp2": make_inline_plan([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], dp=1, tp=2, num_microbatches=1),
    "inline dp3": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=3, num_microbatches=1),
    "inline dp4": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=4, num_microbatches=1),
    "inline tp2 dp2": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=2, tp=2, num_microbatches=1),
}
ROUND_TRIPS = [
    ("split tp2 pp2", "", "split dp2", "states", True),
    ("split dp2", "states", "inline dp3", "parameters", False),
    ("inline dp3", "parameters", "inline pp2 tp2", "", False),
    ("inline tp2 dp2", "parameters", "inline dp4", "in twos", False),
]
"""Saved as, what its replicas share out (optimizer states, parameters, nothing); the same of the loader; tied."""
OTHERS = [
    ("split pp2", "", "inline pp2 tp2", "", True),
    ("split dp2", "states", "split tp2 pp2", "", False),
    ("split tp2 pp2", "", "inline dp3", "states", False),
    ("inline dp3", "parameters", "split dp2", "", False),
    ("one process", "", "inline dp3", "parameters", False),
    ("inline dp4", "in twos", "inline tp2 dp2", "parameters", False),
    ("inline dp3", "parameters", "inline dp4", "in twos", True),
    ("split tp2 pp2", "", "one process", "", True),
    ("inline pp2 tp2", "", "split dp2", "", False),
    ("inline dp3", "states", "split pp2", "", False),
]


def make_rank(rank, folder, name, tied, seed, shared):
    """(rank, optimizer, checkpointer); where replicas share states out, several own rows of an embedding."""
    buckets.BUCKET_BYTES = 10_000
    plan = PLANS[name]
    if shared == "states":
        plan = sharing_optimizer(plan, "vision", "audio", LLM)
    plan = sharing(plan, {"parameters": ALL, "in twos": 2}.get(shared, 0))
    it = Rank(rank, plan, family(2), omni(tied, seed), rate=0.1, weight_decay=0.1)
    checkpointer = Checkpointer(folder / "checkpoints", it.stages, it.optimizer, it.groups, it.parts, keep=2)
    return it, it.optimizer, checkpointer


def update(it, optimizer):
    """Two steps with gradients that depend on the parameter's name only, so that all copies and parts stay in step."""
    for _ in range(2):
        for name, p in it.names.items():
            part = it.parts.get(name)
            whole = gradient_of(name, part.shape if part else p.shape)
            p.grad = part.of(whole) if part else whole
        optimizer.step(0.1)


def gradient_of(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def state_of(it, optimizer):
    """(name, key) -> (part, tensor) of all that this rank holds."""
    state = optimizer.state()
    found = {(n, "value"): (it.parts.get(n), p.detach().clone()) for n, p in it.names.items()}
    for name, tensors in state.items():
        part = it.parts.get(name)
        if name in optimizer.rows:
            part = rows_part(tuple(it.names[name].shape), optimizer.rows[name], part)
        for key, tensor in tensors.items():
            found[name, key] = (part if tensor.dim() else None, tensor.detach().clone())
    return found


def omni(tied, seed=0):
    return build_model(family(), synthetic.hf_config(tied=tied, kv_heads=2), seed=seed, dtype=torch.float32)


def save(rank, folder, name, tied, shared):
    it, optimizer, checkpointer = make_rank(rank, folder, name, tied, 0, shared)
    weights_come_late()
    update(it, optimizer)
    checkpointer.save(7, {"plan_id": "p", "corrections": {LLM: 1.25}})  # and has weights that are on their way
    before = state_of(it, optimizer)
    update(it, optimizer)  # while the thread writes: the checkpoint has what was there before
    checkpointer.wait()
    return before


def load(rank, folder, name, tied, shared):
    it, optimizer, checkpointer = make_rank(rank, folder, name, tied, 1, shared)
    latest = checkpointer.load_latest()
    loaded = state_of(it, optimizer)
    update(it, optimizer)  # the moments are in use, not merely stored
    return latest, loaded, state_of(it, optimizer)


def one_process(tied, num_updates):
    return updated(omni(tied), num_updates)


def updated(model, num_updates):
    """The same updates of the whole model, without any checkpoint: what every rank must hold a part of."""
    names = dict(model.named_parameters())
    adam = torch.optim.AdamW(names.values(), lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(2 * num_updates):
        for name, p in names.items():
            p.grad = gradient_of(name, p.shape)
        adam.step()
    return {
        (n, key): value
        for n, p in names.items()
        for key, value in {"value": p.detach(), **{k: adam.state[p][k] for k in MOMENTS}}.items()
    }


def assert_parts_of(expected, ranks):
    covered = set()
    for held in ranks:
        for key, (part, tensor) in held.items():
            assert torch.equal(tensor, part.of(expected[key]) if part else expected[key]), key
        covered |= set(held)
    assert covered == set(expected)


@pytest.mark.parametrize(
    ("saved_as", "by_saver", "loaded_as", "by_loader", "tied"),
    [*ROUND_TRIPS, *(pytest.param(*other, marks=pytest.mark.lane("layouts")) for other in OTHERS)],
)
def test_any_plan_loads_what_any_other_saved(saved_as, by_saver, loaded_as, by_loader, tied, tmp_path):
    saved = run_ranks(save, PLANS[saved_as].num_processes, tmp_path, saved_as, tied, by_saver)
    if not by_saver:
        assert_parts_of(one_process(tied, 1), saved)
    ranks = run_ranks(load, PLANS[loaded_as].num_processes, tmp_path, loaded_as, tied, by_loader)
    for latest, _, _ in ranks:
        assert (latest["next_step"], latest["plan_id"], latest["corrections"]) == (7, "p", {LLM: 1.25})
    assert_parts_of(one_process(tied, 1), [loaded for _, loaded, _ in ranks])
    assert_parts_of(one_process(tied, 2), [trained for _, _, trained in ranks])


def make_rank_with_experts(rank, folder, degrees):
    dp, ep, shards = degrees
    subject = Small("qwen3_vl_moe")
    layers = {spec.module: spec.num_layers for spec in subject.family.specs()}
    plan = sharing(make_inline_plan([layers], dp=dp, ep=ep, num_microbatches=1), shards)
    plan = plan if shards else sharing_optimizer(plan, "vision", LLM)
    it = Rank(rank, plan, subject.family, subject.build(), rate=0.1, weight_decay=0.1)
    return it, Checkpointer(folder / "checkpoints", it.stages, it.optimizer, it.groups, it.parts, keep=2)


def save_experts(rank, folder, degrees):
    it, checkpointer = make_rank_with_experts(rank, folder, degrees)
    update(it, it.optimizer)
    checkpointer.save(7, {})
    checkpointer.wait()


def load_experts(rank, folder, degrees):
    it, checkpointer = make_rank_with_experts(rank, folder, degrees)
    checkpointer.load_latest()
    update(it, it.optimizer)
    return state_of(it, it.optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((4, 4, ALL), (4, 2, 0)),
        ((4, 2, 0), (2, 2, ALL)),
        pytest.param((4, 4, ALL), (3, 1, ALL), marks=pytest.mark.lane("layouts")),
    ],
)
def test_any_expert_parallel_degree_loads_what_another_saved(saved, loaded, tmp_path):
    """With parameters shared out, or optimizers alone."""
    run_ranks(save_experts, saved[0], tmp_path, saved)
    ranks = run_ranks(load_experts, loaded[0], tmp_path, loaded)
    assert_parts_of(updated(Small("qwen3_vl_moe").build(), 2), ranks)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_of_fused_matrices_are_put_together_and_taken_apart_again(tmp_path):
    """Query, key and value in one matrix, of which each of two ranks holds half."""
    whole = torch.arange(24.0).reshape(12, 2)
    parts = [even_part(whole.shape, 0, 3, rank, 2) for rank in range(2)]
    assert [part.ranges for part in parts] == [((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))]
    blocks = [block for part in parts for block in blocks_of("model/w", part.of(whole), part)]
    assert len({block.offsets for block in blocks}) == 6
    dcp.save({}, storage_writer=BlockWriter(tmp_path), planner=BlockSavePlanner(blocks), no_dist=True)
    assert torch.equal(read_model(tmp_path)["w"], whole)
    loaded = torch.zeros(6, 2)
    planner = BlockLoadPlanner(list(blocks_of("model/w", loaded, parts[1])))
    dcp.load({}, storage_reader=SafeReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(loaded, parts[1].of(whole))
