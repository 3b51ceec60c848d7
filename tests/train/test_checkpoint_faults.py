"""Checkpoints on disks that fill up and after damage: what is loaded is always complete. Kills: `test_resume.py`."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dflop.errors import TrainError
from dflop.models.build import Stage
from dflop.parallel.topology import make_groups
from dflop.records import LLM
from dflop.train.checkpoint import Checkpointer
from dflop.train.manifest import read_latest
from dflop.train.optim import Optimizer, OptimizerSettings
from tests.train.ranks import run_ranks
from tests.train.synthetic import make_plan

STEP = "step-{:08d}"


def small(folder, *, num_ranks=1, rank=0, keep=2, value=0.0, size=3, name="w", **settings):
    """A checkpointer of one parameter per rank; two replicas hold the same."""
    groups = make_groups(make_plan({LLM: (1, num_ranks)}, num_microbatches=1), rank, timeout_s=60)
    stage = Stage({name: torch.nn.Parameter(torch.full((size,), value))})
    optimizer = Optimizer(stage.names, OptimizerSettings(0.1, 0.0))
    return stage, Checkpointer(folder, [stage], optimizer, groups, {}, keep=keep, **settings)


def saved(folder, *steps, **settings):
    """A folder with a checkpoint per step, whose weights are the step."""
    stage, checkpointer = small(folder, **settings)
    for step in steps:
        stage.names["w"].data.fill_(step)
        checkpointer.save(step, {})
    checkpointer.wait()
    return stage, checkpointer


def loaded(folder):
    stage, checkpointer = small(folder)
    latest = checkpointer.load_latest()
    return latest, stage.names["w"].tolist()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_are_kept(one_rank, tmp_path):
    assert loaded(tmp_path / "none") == (None, [0.0] * 3)
    assert read_latest(tmp_path / "none") is None
    saved(tmp_path / "c", 1, 2, 3, 4, 5, keep=3)
    assert names_in(tmp_path / "c") == [STEP.format(n) for n in (3, 4, 5)]
    latest, weights = loaded(tmp_path / "c")
    assert latest == {"next_step": 5, "name": STEP.format(5)}
    assert weights == [5.0] * 3


def test_training_changes_weights_while_the_old_ones_are_written(one_rank, tmp_path, monkeypatch):
    """The writer is held up until training has gone on; the next save waits for it."""
    may_write, write = threading.Event(), torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data

    def held_up(*args, **kwargs):
        assert may_write.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", held_up)
    stage, checkpointer = small(tmp_path / "c", value=1.0)
    checkpointer.save(1, {})
    stage.names["w"].data.fill_(2.0)
    assert read_latest(tmp_path / "c") is None
    may_write.set()
    checkpointer.save(2, {})
    assert read_latest(tmp_path / "c")["next_step"] == 1
    checkpointer.wait()
    assert read_latest(tmp_path / "c")["next_step"] == 2
    assert loaded(tmp_path / "c")[1] == [2.0] * 3
    shutil.rmtree(tmp_path / "c" / STEP.format(2))
    assert loaded(tmp_path / "c")[1] == [1.0] * 3


def test_what_a_crash_leaves_behind_is_ignored_and_removed(one_rank, tmp_path):
    saved(tmp_path / "c", 1)
    half_written = tmp_path / "c" / ".tmp-step-00000002"
    half_written.mkdir()
    (half_written / "__7_0.distcp").write_bytes(b"half")
    assert loaded(tmp_path / "c")[1] == [1.0] * 3
    assert names_in(tmp_path / "c") == [STEP.format(1)]


def test_a_damaged_checkpoint_that_is_later_does_not_push_out_the_one_in_use(one_rank, tmp_path):
    saved(tmp_path, 3, 9)
    flip(tmp_path / STEP.format(9) / "__0_0.distcp")
    assert loaded(tmp_path)[1] == [3.0] * 3
    saved(tmp_path, 4, keep=1)
    assert loaded(tmp_path)[1] == [4.0] * 3
    assert read_latest(tmp_path)["next_step"] == 4


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "tensors truncated": ("__0_0.distcp", truncate, "bytes instead of"),
    "a bit flipped": ("__0_0.distcp", flip, "__0_0.distcp has changed"),
    "tensors gone": ("__0_0.distcp", Path.unlink, "__0_0.distcp: No such file"),
    "index changed": ("index.json", flip, "index.json has changed"),
    "manifest truncated": ("manifest.json", truncate, "manifest.json is damaged"),
    "manifest of something else": ("manifest.json", lambda p: p.write_text("[1]"), "manifest.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(one_rank, tmp_path, kind, capsys):
    file, damage, reason = DAMAGE[kind]
    saved(tmp_path, 1, 2)
    damage(tmp_path / STEP.format(2) / file)
    latest, weights = loaded(tmp_path)
    assert (latest["next_step"], weights) == (1, [1.0] * 3)
    assert latest["fell_back_from"].startswith(f"{STEP.format(2)}: ")
    assert reason in latest["fell_back_from"]
    assert latest["fell_back_from"] in capsys.readouterr().err
    # Who only asks where a run stands does not read the tensors, so a flipped bit stays unseen.
    assert read_latest(tmp_path)["next_step"] == (2 if damage is flip else 1)


def test_training_does_not_start_over_by_itself_where_all_is_damaged(one_rank, tmp_path):
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        truncate(tmp_path / STEP.format(step) / "__0_0.distcp")
    with pytest.raises(TrainError, match="every checkpoint is damaged: step-00000002: ") as caught:
        loaded(tmp_path)
    assert "move" in caught.value.hint


@pytest.mark.parametrize(
    ("other", "told"),
    [({"size": 4}, "1 of another shape, e.g. `w`"), ({"name": "v"}, "1 missing from it, e.g. `v`; 1 unknown to the")],
)
def test_a_checkpoint_of_another_model_is_refused(one_rank, tmp_path, other, told):
    saved(tmp_path, 1)
    _, checkpointer = small(tmp_path, **other)
    with pytest.raises(TrainError, match="the checkpoint is of another model") as caught:
        checkpointer.load_latest()
    assert told in str(caught.value)


@pytest.mark.parametrize("place", ["write_data", "finish"])
def test_a_full_disk_costs_one_checkpoint_and_not_the_run(one_rank, tmp_path, monkeypatch, place):
    told = []
    stage, checkpointer = saved(tmp_path, 1, on_failure=told.append)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"torch.distributed.checkpoint.filesystem.FileSystemWriter.{place}", full)
        stage.names["w"].data.fill_(2.0)
        checkpointer.save(2, {})
        checkpointer.close()
    assert [e.what for e in told] == ["cannot write checkpoint: rank 0: No space left on device"]
    assert names_in(tmp_path) == ["rendezvous-one", STEP.format(1)]
    assert loaded(tmp_path)[1] == [1.0] * 3
    stage.names["w"].data.fill_(3.0)
    checkpointer.save(3, {})  # the next period tries again
    checkpointer.wait()
    assert loaded(tmp_path)[1] == [3.0] * 3


def suffer(rank, folder):
    """Rank 1's disk is full while the others' are not; then a file is damaged that only one rank reads."""
    stage, checkpointer = small(folder / "c", num_ranks=3, rank=rank, value=1.0, size=1000)
    checkpointer.save(1, {})
    checkpointer.wait()
    writer, told = torch.distributed.checkpoint.filesystem.FileSystemWriter, ""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(writer, "write_data", full)
        checkpointer.save(2, {})
        try:
            checkpointer.wait()
        except TrainError as error:
            told = error.what
    dist.barrier()
    found = [told, names_in(folder / "c"), checkpointer.load_latest()["next_step"]]
    stage.names["w"].data.fill_(3.0)
    checkpointer.save(3, {})
    checkpointer.wait()
    found.append(checkpointer.load_latest()["next_step"])
    dist.barrier()
    if rank == 0:
        flip(folder / "c" / STEP.format(3) / "__1_0.distcp")
    dist.barrier()
    latest = checkpointer.load_latest()
    return [*found, latest["next_step"], latest["fell_back_from"], stage.names["w"][0].item()]


def test_all_ranks_fail_together_with_one_full_disk_and_fall_back_together(tmp_path):
    told = "cannot write checkpoint: rank 1: No space left on device"
    reason = f"{STEP.format(3)}: __1_0.distcp has changed"
    assert run_ranks(suffer, 3, tmp_path) == [[told, [STEP.format(1)], 1, 3, 1, reason, 1.0]] * 3
