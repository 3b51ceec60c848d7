from __future__ import annotations

import json
import zlib

import pytest
import torch

from dflop.errors import TrainError
from dflop.models.build import Stage, build_model, cut_stage
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM
from dflop.train.checkpoint import Checkpointer, read_latest
from tests.train import synthetic
from tests.train.ranks import run_ranks
from tests.train.synthetic import family, make_plan

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def make_rank(rank, folder, layout, tied, seed):
    """A rank's stage, optimizer and checkpointer."""
    plan = make_plan(layout, num_microbatches=1)
    seat = seat_of(plan, rank)
    model = build_model(family(), synthetic.hf_config(tied=tied), seed=seed, dtype=torch.float32)
    (part,) = seat.parts
    stage = cut_stage(model, family(), part.module, part.layers)
    optimizer = torch.optim.AdamW(stage.names.values(), lr=0.1)
    groups = make_groups(plan, rank, timeout_s=60)
    return stage, optimizer, Checkpointer(folder / "checkpoints", [stage], optimizer, groups.control, keep=2)


def update(stage, optimizer):
    """Gradients that depend on the parameter's name only, so that replicas and tied copies stay equal."""
    for _ in range(2):
        for name, p in stage.names.items():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        optimizer.step()


def state_of(stage, optimizer):
    return {
        name: {"value": p.detach().clone(), **{k: optimizer.state[p][k].clone() for k in MOMENTS}}
        for name, p in stage.names.items()
    }


def save(rank, folder, layout, tied):
    stage, optimizer, checkpointer = make_rank(rank, folder, layout, tied, seed=0)
    update(stage, optimizer)
    checkpointer.save(7, {"plan_id": "p"})
    return state_of(stage, optimizer)


def load(rank, folder, layout, tied):
    stage, optimizer, checkpointer = make_rank(rank, folder, layout, tied, seed=1)
    latest = checkpointer.load_latest()
    loaded = state_of(stage, optimizer)
    update(stage, optimizer)  # the moments are in use, not merely stored
    return latest, loaded, state_of(stage, optimizer)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "tied"),
    [
        ({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, {"vision": (1, 1), "audio": (1, 1), LLM: (1, 2)}, False),
        ({"vision": (1, 1), "audio": (1, 1), LLM: (1, 1)}, {"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, True),
    ],
    ids=["pp2 to dp2", "tied, one stage to pp2"],
)
def test_a_checkpoint_loads_into_another_layout(saved_as, loaded_as, tied, tmp_path):
    ranks = run_ranks(save, sum(pp * dp for pp, dp in saved_as.values()), tmp_path, saved_as, tied)
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    expected = {name: values for rank in ranks for name, values in rank.items()}
    for latest, loaded, _ in run_ranks(load, sum(pp * dp for pp, dp in loaded_as.values()), tmp_path, loaded_as, tied):
        assert (latest["next_step"], latest["plan_id"]) == (7, "p")
        for name, values in loaded.items():
            for key, value in values.items():
                assert torch.equal(value, expected[name][key]), f"{name} {key}"
    assert set(expected) == {n for n, _ in synthetic.tiny_model(tied=tied).named_parameters()}


def small(folder, group, *, keep=2, value=0.0, size=3):
    stage = Stage({"w": torch.nn.Parameter(torch.full((size,), value))})
    optimizer = torch.optim.AdamW(stage.names.values())
    return stage, Checkpointer(folder, [stage], optimizer, group, keep)


def test_without_a_checkpoint_there_is_nothing_to_load(one_rank, tmp_path):
    _, checkpointer = small(tmp_path / "none", one_rank)
    assert checkpointer.load_latest() is None
    assert read_latest(tmp_path / "none") is None


def test_only_the_newest_are_kept(one_rank, tmp_path):
    stage, checkpointer = small(tmp_path, one_rank, keep=3)
    for step in range(1, 6):
        stage.names["w"].data.fill_(step)
        checkpointer.save(step, {})
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [f"step-{n:08d}" for n in (3, 4, 5)]
    fresh, checkpointer = small(tmp_path, one_rank)
    assert checkpointer.load_latest() == {"next_step": 5, "name": "step-00000005"}
    assert fresh.names["w"].tolist() == [5.0] * 3


def test_what_a_crash_leaves_behind_is_ignored_and_replaced(one_rank, tmp_path):
    stage, checkpointer = small(tmp_path, one_rank, value=1.0)
    checkpointer.save(1, {})
    half_written = tmp_path / ".tmp-step-00000002"
    half_written.mkdir()
    (half_written / "__7_0.distcp").write_bytes(b"half")
    (tmp_path / ".tmp-latest.json").write_text('{"next_st')
    fresh, resumed = small(tmp_path, one_rank)
    assert resumed.load_latest()["next_step"] == 1
    assert fresh.names["w"].tolist() == [1.0] * 3
    stage.names["w"].data.fill_(2.0)
    checkpointer.save(2, {})
    assert not half_written.exists()
    assert not (tmp_path / "step-00000002" / "__7_0.distcp").exists()
    assert resumed.load_latest()["next_step"] == 2
    assert fresh.names["w"].tolist() == [2.0] * 3


def test_a_later_checkpoint_that_was_never_named_does_not_push_out_the_one_in_use(one_rank, tmp_path):
    _, checkpointer = small(tmp_path, one_rank, keep=1, value=1.0)
    (tmp_path / "step-00000009").mkdir(parents=True)
    checkpointer.save(4, {})
    fresh, resumed = small(tmp_path, one_rank)
    assert resumed.load_latest()["next_step"] == 4
    assert fresh.names["w"].tolist() == [1.0] * 3


def test_a_folder_that_cannot_be_written_is_named(one_rank, tmp_path):
    (tmp_path / "file").write_text("in the way")
    _, checkpointer = small(tmp_path / "file", one_rank)
    with pytest.raises(TrainError, match="cannot write checkpoint: File exists") as caught:
        checkpointer.save(1, {})
    assert caught.value.where == str(tmp_path / "file" / "step-00000001")


def test_a_disk_that_fails_while_tensors_are_written_is_an_error_of_ours(one_rank, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    _, checkpointer = small(tmp_path, one_rank, value=1.0)
    checkpointer.save(1, {})
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", full)
    with pytest.raises(TrainError, match=r"cannot write checkpoint: rank 0: .*No space left on device"):
        checkpointer.save(2, {})
    assert read_latest(tmp_path)["next_step"] == 1


@pytest.mark.parametrize("damage", ["gone", "other model"])
def test_a_checkpoint_that_cannot_be_loaded_is_named(one_rank, tmp_path, damage):
    _, checkpointer = small(tmp_path, one_rank)
    checkpointer.save(1, {})
    if damage == "gone":
        (tmp_path / "latest.json").write_text(json.dumps({"next_step": 2, "name": "step-00000002"}))
    _, other = small(tmp_path, one_rank, size=3 if damage == "gone" else 4)
    with pytest.raises(TrainError, match="cannot load checkpoint: rank 0: ") as caught:
        other.load_latest()
    assert caught.value.where == str(tmp_path / ("step-00000002" if damage == "gone" else "step-00000001"))
