"""A base is its bytes, whoever reads which of them, wherever they lie."""

from __future__ import annotations

import pytest

from dflop.errors import ConfigError
from dflop.train import base
from dflop.train.base import META, Base, base_problem


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "PIECE_BYTES", 100)
    made = tmp_path / "base"
    made.mkdir()
    for number, size in enumerate((250, 100, 1)):
        (made / f"model-{number}.safetensors").write_bytes(bytes(range(size)))
    return made


def described(folder, num_ranks=1, seed=0):
    of = Base(frozenset({"weight"}), folder, seed)
    return of.described([of.digests(slice(rank, None, num_ranks)) for rank in range(num_ranks)])


def test_any_number_of_ranks_says_the_same(folder):
    assert len(Base(folder=folder).digests()) == 5
    assert described(folder) == described(folder, 3) == described(folder, 8)


def test_a_base_may_move_and_may_not_change(folder):
    meta = {META: described(folder)}
    moved = folder.rename(folder.with_name("moved"))
    assert base_problem(meta, described(moved)) == ""
    file = moved / "model-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    problem = base_problem(meta, described(moved))
    assert str(folder) in problem
    assert str(moved) in problem


def test_a_base_that_cannot_be_read_is_named(folder):
    (folder / "model-9.safetensors").mkdir()
    with pytest.raises(ConfigError, match="cannot read the base") as raised:
        described(folder)
    assert raised.value.where == str(folder)


def test_random_bases_differ_by_their_seeds_and_checkpoints_without_one_go_on():
    meta = {META: described(None, seed=1)}
    assert base_problem(meta, described(None, seed=1)) == ""
    assert "random, seed 1" in base_problem(meta, described(None, seed=2))
    assert base_problem({}, {}) == ""
    assert "`train.lora` is not set" in base_problem(meta, {})
