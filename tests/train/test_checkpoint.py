"""Round trips: whatever plan wrote a checkpoint, whatever plan loads it, every tensor is the same."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflop.models.build import build_model
from dflop.parallel.part import even_part
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM
from dflop.train.checkpoint import Checkpointer
from dflop.train.fsdp import shard_parameters
from dflop.train.manifest import read_latest
from dflop.train.optim import OptimizerSettings, make_optimizer
from dflop.train.stages import make_stages
from tests.models.tiny_families import CASES
from tests.train import synthetic
from tests.train.ranks import run_ranks
from tests.train.synthetic import family, make_inline_plan, make_plan

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
PLANS = {
    "one process": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=1),
    "split pp2": make_plan({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, num_microbatches=1),
    "split tp2 pp2": make_plan({"vision": (1, 1, 2), "audio": (1, 1), LLM: (2, 1, 2)}, num_microbatches=1),
    "encoder pp2, dp2": make_plan({"vision": (2, 1), "audio": (1, 1), LLM: (1, 2)}, num_microbatches=1),
    "inline pp2 tp2": make_inline_plan([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], dp=1, tp=2, num_microbatches=1),
    "inline dp3": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=3, num_microbatches=1),
}
ROUND_TRIPS = [
    ("split pp2", "one process", False),
    ("split pp2", "inline pp2 tp2", True),
    ("split tp2 pp2", "inline dp3", False),
    ("split tp2 pp2", "one process", True),
    ("encoder pp2, dp2", "split tp2 pp2", False),
    ("inline pp2 tp2", "encoder pp2, dp2", False),
    ("one process", "inline pp2 tp2", True),
]


def make_rank(rank, folder, plan, model, family_, shared="", **settings):
    """A rank's stages, optimizer, parts and checkpointer; replicas share out nothing, `states` or `parameters`."""
    if shared == "states":
        plan = replace(plan, modules=tuple(replace(m, shard_optimizer=True) for m in plan.modules))
    seat, groups = seat_of(plan, rank), make_groups(plan, rank, timeout_s=60)
    stages, parts = make_stages(model, family_, seat, groups.tensor)
    if shared == "parameters":
        parts = {**parts, **shard_parameters(stages, plan, seat, groups)}
    numbers = OptimizerSettings(learning_rate=0.1, weight_decay=0.1)
    optimizer = make_optimizer(plan, seat, stages, groups, parts, numbers)
    checkpointer = Checkpointer(folder / "checkpoints", stages, optimizer, groups, parts, keep=2, **settings)
    return stages, optimizer, parts, checkpointer


def update(stages, parts, optimizer):
    """Two steps with gradients that depend on the parameter's name only, so that all copies and parts stay in step."""
    for _ in range(2):
        for stage in stages:
            for name, p in stage.names.items():
                part = parts.get(name)
                shape = part.shape if part else p.shape
                whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
                p.grad = part.of(whole) if part else whole
        optimizer.step(0.1)


def state_of(stages, parts, optimizer):
    """(name, key) -> (part, tensor) of all that this rank holds."""
    found = {(n, "value"): (parts.get(n), p.detach().clone()) for stage in stages for n, p in stage.names.items()}
    for name, tensors in optimizer.state().items():
        for key, tensor in tensors.items():
            found[name, key] = (parts.get(name) if tensor.dim() else None, tensor.detach().clone())
    return found


def omni(tied, seed):
    return build_model(family(), synthetic.hf_config(tied=tied, kv_heads=2), seed=seed, dtype=torch.float32)


def save(rank, folder, name, tied, shared):
    stages, optimizer, parts, checkpointer = make_rank(rank, folder, PLANS[name], omni(tied, 0), family(2), shared)
    update(stages, parts, optimizer)
    before = state_of(stages, parts, optimizer)
    checkpointer.save(7, {"plan_id": "p", "corrections": {LLM: 1.25}})
    update(stages, parts, optimizer)  # while the thread writes: the checkpoint has what was there before
    checkpointer.wait()
    return before


def load(rank, folder, name, tied, shared):
    stages, optimizer, parts, checkpointer = make_rank(rank, folder, PLANS[name], omni(tied, 1), family(2), shared)
    latest = checkpointer.load_latest()
    loaded = state_of(stages, parts, optimizer)
    update(stages, parts, optimizer)  # the moments are in use, not merely stored
    return latest, loaded, state_of(stages, parts, optimizer)


def one_process(tied, num_updates):
    """The same updates of the whole model, without any checkpoint: what every rank must hold a part of."""
    model = omni(tied, 0)
    names = dict(model.named_parameters())
    adam = torch.optim.AdamW(names.values(), lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(2 * num_updates):
        for name, p in names.items():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
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


@pytest.mark.parametrize(("saved_as", "loaded_as", "tied"), ROUND_TRIPS, ids=[f"{a} to {b}" for a, b, _ in ROUND_TRIPS])
def test_any_plan_loads_what_any_other_saved(saved_as, loaded_as, tied, tmp_path):
    saved = run_ranks(save, PLANS[saved_as].num_processes, tmp_path, saved_as, tied, "")
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    assert_parts_of(one_process(tied, 1), saved)
    ranks = run_ranks(load, PLANS[loaded_as].num_processes, tmp_path, loaded_as, tied, "")
    for latest, _, _ in ranks:
        assert (latest["next_step"], latest["plan_id"], latest["corrections"]) == (7, "p", {LLM: 1.25})
    assert_parts_of(one_process(tied, 1), [loaded for _, loaded, _ in ranks])
    assert_parts_of(one_process(tied, 2), [trained for _, _, trained in ranks])


SHARED = [
    ("inline dp3", "states", "split pp2", ""),
    ("split pp2", "", "inline dp3", "states"),
    ("inline dp3", "parameters", "split tp2 pp2", ""),
    ("encoder pp2, dp2", "states", "inline dp3", "parameters"),
]


@pytest.mark.parametrize(("saved_as", "by_saver", "loaded_as", "by_loader"), SHARED)
def test_what_replicas_share_out_loads_where_they_do_not(saved_as, by_saver, loaded_as, by_loader, tmp_path):
    run_ranks(save, PLANS[saved_as].num_processes, tmp_path, saved_as, False, by_saver)
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    ranks = run_ranks(load, PLANS[loaded_as].num_processes, tmp_path, loaded_as, False, by_loader)
    assert_parts_of(one_process(False, 1), [loaded for _, loaded, _ in ranks])
    assert_parts_of(one_process(False, 2), [trained for _, _, trained in ranks])


def save_fused(rank, folder):
    case = CASES["Qwen2.5-VL"]
    plan = make_plan({"vision": (1, 1, 2), LLM: (1, 1)}, num_microbatches=1, of=case.family)
    *_, checkpointer = make_rank(rank, folder, plan, case.build(), case.family)
    checkpointer.save(1, {})
    checkpointer.wait()


def load_fused(rank, folder):
    case = CASES["Qwen2.5-VL"]
    plan = make_inline_plan([{"vision": 3, LLM: 4}], dp=1, num_microbatches=1)
    model = build_model(case.family, case.full_config, seed=1, dtype=torch.float32)
    stages, *_, checkpointer = make_rank(rank, folder, plan, model, case.family)
    checkpointer.load_latest()
    return {n: p.detach() for stage in stages for n, p in stage.names.items()}


def test_fused_matrices_are_put_together_again(tmp_path):
    run_ranks(save_fused, 3, tmp_path)
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    (whole,) = run_ranks(load_fused, 1, tmp_path)
    expected = dict(CASES["Qwen2.5-VL"].build().named_parameters())
    assert set(whole) == set(expected)
    for name, value in whole.items():
        assert torch.equal(value, expected[name]), name


def test_parts_of_fused_matrices_cover_the_whole_once():
    whole = torch.arange(24.0).reshape(12, 2)
    parts = [even_part(whole.shape, 0, 3, rank, 2) for rank in range(2)]
    assert parts[1].ranges == ((2, 4), (6, 8), (10, 12))
    rebuilt = torch.full_like(whole, -1)
    for part in parts:
        for (row, column), view in part.pieces(part.of(whole)):
            target = rebuilt[row : row + view.shape[0], column : column + view.shape[1]]
            assert (target == -1).all()
            target.copy_(view)
    assert torch.equal(rebuilt, whole)


def draw():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]  # noqa: NPY002, numpy's global state is what is tested


def save_random(rank, folder, name):
    *_, checkpointer = make_rank(rank, folder, PLANS[name], omni(False, 0), family(2))
    torch.manual_seed(rank)
    np.random.seed(rank)  # noqa: NPY002, numpy's global state is what is tested
    random.seed(rank)
    checkpointer.save(3, {"seed": 5})
    checkpointer.wait()
    return draw()


def load_random(rank, folder, name):
    *_, checkpointer = make_rank(rank, folder, PLANS[name], omni(False, 0), family(2))
    checkpointer.load_latest()
    return draw()


def test_random_generators_go_on_where_they_were(tmp_path):
    drawn = run_ranks(save_random, 4, tmp_path, "split pp2")
    assert len({str(d) for d in drawn}) == 4
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    assert run_ranks(load_random, 4, tmp_path, "split pp2") == drawn


def test_other_ranks_seed_theirs_anew_alike_within_a_tensor_parallel_group(tmp_path):
    drawn = run_ranks(save_random, 1, tmp_path, "one process")
    again = []
    for _ in range(2):
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        again.append(run_ranks(load_random, 4, tmp_path, "inline pp2 tp2"))
    assert again[0] == again[1]
    first, second, third, fourth = again[0]
    assert first == second != third == fourth
    assert drawn[0] not in again[0]


def test_ranks_that_form_a_tensor_parallel_group_only_now_draw_alike(tmp_path):
    """As many ranks as before, each with a saved state of its own, but two by two they must agree now."""
    drawn = run_ranks(save_random, 4, tmp_path, "split pp2")
    assert len({str(d) for d in drawn}) == 4
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    first, second, third, fourth = run_ranks(load_random, 4, tmp_path, "inline pp2 tp2")
    assert first == second != third == fourth


def save_counted(rank, folder, name):
    stages, _, _, checkpointer = make_rank(rank, folder, PLANS[name], omni(False, 0), family(2))
    checkpointer.save(1, {})
    checkpointer.wait()
    return sum(stage.param_bytes for stage in stages)


def test_replicas_share_out_the_writing(tmp_path):
    held = run_ranks(save_counted, 3, tmp_path, "inline dp3")
    latest = read_latest(tmp_path / "checkpoints")
    sizes = [p.stat().st_size for p in (tmp_path / "checkpoints" / latest["name"]).glob("*.distcp")]
    assert len(sizes) == 3
    # A parameter with two moments is three times its size; nothing is written twice, and nobody writes much more.
    assert sum(sizes) < 3 * held[0] * 1.5
    assert max(sizes) < 1.3 * min(sizes)
