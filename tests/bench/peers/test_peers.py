"""The bench of peers: every peer places every sample once, constraints are the same for all, results add up."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from dflop.plan.space import Problem
from dflop.records import LLM
from tests.bench.peers import packages
from tests.bench.peers.batchers import batchers, blind_assignment
from tests.bench.peers.board import Board, Result, Row, best_count, ratios
from tests.bench.peers.cases import Cell, cells
from tests.bench.peers.contest import epoch_rows, flatflow_rows
from tests.bench.peers.packages import FLATFLOW, FlatFlow, batch_rebalance, galvatron_import, length_grouped_order
from tests.bench.peers.page import galvatron_row, tables, text
from tests.builders import make_cluster, make_cost, make_plan, make_specs, random_batch

NUM_SAMPLES = 32


@pytest.fixture(scope="module")
def problem() -> Problem:
    batches = tuple(random_batch(NUM_SAMPLES, encoders=("vision",), seed=seed) for seed in range(2))
    cost = make_cost("vision").extrapolating()
    return Problem("peers", make_specs("vision"), make_cluster(16, num_cores=16), cost, batches, NUM_SAMPLES, 0)


@pytest.fixture
def board(problem) -> Board:
    plan = make_plan({"vision": 2, LLM: 2}, llm_pp=2, global_batch_size=NUM_SAMPLES)
    return Board(problem, plan, problem.batches)


@pytest.mark.parametrize("peer", batchers(), ids=lambda peer: peer.name)
def test_every_sample_and_item_has_a_place(board, peer):
    job = board.job(4, 0)
    slot, rank = peer.decide(job, 0)
    assert slot.shape == rank.shape == (NUM_SAMPLES,)
    assert 0 <= rank.min() <= rank.max() < 2
    assert slot.min() >= 0
    assert peer.counts_itself or slot.max() < 4
    items = job.items["vision"]
    if not peer.counts_itself:
        assignment = blind_assignment(job, (slot, rank))
        cells_of_items = slot[items.sample_of] * 2 + assignment.item_rank["vision"]
        for k in range(4):  # data-blind: counts on an encoder's ranks differ by one at most
            counts = np.bincount(cells_of_items, minlength=8)[2 * k : 2 * k + 2]
            assert abs(int(counts[0]) - int(counts[1])) <= 1


@pytest.mark.parametrize(
    "peer", [b for b in batchers() if b.name in ("LPT on tokens", "batch rebalance")], ids=lambda peer: peer.name
)
def test_a_peer_never_beats_the_best_of_all_assignments_it_is_compared_with(board, peer):
    ours, theirs = board.dflop(), board.run(4, peer.decide)
    assert len(theirs.step_s) == len(ours.step_s) == 2
    if peer.name == "LPT on tokens":  # dflop's search begins with it, its media items split better or alike
        assert min(ratios(theirs.step_s, ours.step_s)) >= 1 - 1e-9


def test_the_count_of_ours_is_chosen_as_that_of_peers(board):
    own, given = board.dflop_with_own_count(), board.dflop()
    assert own.mean_s <= given.mean_s * 1.01
    assert own.num_over_memory == given.num_over_memory == 0


def test_packing_by_memory_counts_its_microbatches_itself(board, problem):
    peer = next(b for b in batchers() if b.counts_itself)
    job = board.job(4, 0)
    slot, _ = peer.decide(job, 0)
    total = int(job.items[LLM].num_tokens.sum())
    assert slot.max() + 1 >= math.ceil(total / job.caps.bucket_tokens / 2)
    assert board.run(4, peer.decide, counts_itself=True).num_over_memory == 0


def test_who_exceeds_memory_is_told(problem):
    plan = make_plan({"vision": 2, LLM: 2}, llm_pp=2, global_batch_size=NUM_SAMPLES)
    small = dataclasses.replace(
        plan, modules=tuple(dataclasses.replace(m, max_tokens=1) if m.module == LLM else m for m in plan.modules)
    )
    board = Board(problem, small, problem.batches)
    lpt = next(b for b in batchers() if b.name == "LPT on tokens")
    assert board.run(4, lpt.decide).num_over_memory == 0

    def all_in_one(job: Any, seed: int) -> tuple[Any, Any]:
        none = np.zeros(NUM_SAMPLES, dtype=np.int64)
        return none, none

    assert board.run(4, all_in_one).num_over_memory == 2


def test_the_count_of_a_peer_keeps_to_the_memory_before_it_is_fast():
    fast, fits = Result([1.0, 1.0], 1, 0.0), Result([2.0, 2.0], 0, 0.0)
    assert best_count({4: fast, 8: fits, 16: Result([3.0, 3.0], 0, 0.0)}) == 8
    assert best_count({4: fast}) == 4


def test_rounding_makes_no_winner():
    assert ratios([1.0 + 1e-12, 2.0, 0.5], [1.0, 1.0, 1.0]) == [1.0, 2.0, 0.5]


def test_batch_rebalance_is_what_every_rank_of_transformers_yields():
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    tokens = np.random.default_rng(0).integers(1, 500, 24)
    slot, rank = batch_rebalance(tokens, 3, 2)
    for r in range(2):
        sampler = BatchRebalanceSampler(tokens.tolist(), 24, 2, 3, shuffle=False, rank=r)
        assert [sorted(m) for m in sampler] == [np.flatnonzero((slot == k) & (rank == r)).tolist() for k in range(3)]
    with pytest.raises(ValueError, match="24 samples for 25 buckets"):
        batch_rebalance(tokens, 5, 5)


def test_length_grouping_puts_like_beside_like():
    tokens = np.random.default_rng(0).integers(1, 10_000, 400)
    order = length_grouped_order(tokens, 10, seed=0)
    assert sorted(order.tolist()) == list(range(400))
    spread = np.ptp(tokens[order].reshape(40, 10), axis=1).mean()
    assert spread < 0.5 * np.ptp(tokens.reshape(40, 10), axis=1).mean()


def test_over_the_epoch_the_same_samples_are_in_as_many_steps(problem, board):
    base = board.dflop()
    rows = epoch_rows(problem, board, base, "not there")
    assert [row.peer for row in rows] == [
        "length-grouped over the epoch", "first fit decreasing over the epoch", "FlatFlow over the epoch",
    ]  # fmt: skip
    assert [len(row.ratio) for row in rows] == [1, 1, 0]
    assert all(0 < row.ratio[0] < 10 for row in rows[:2])
    assert rows[2].note == "not there"


@pytest.mark.slow
@pytest.mark.skipif(not FLATFLOW.is_dir(), reason="no FlatFlow beside the environment (make rivals)")
def test_flatflow_keeps_the_batch_and_equal_counts(board):
    with FlatFlow(make_specs("vision")[-1]) as flatflow:
        tokens = board.num_tokens[0]
        (call,) = flatflow.orders([tokens], global_batch_size=NUM_SAMPLES, num_slots=4, num_ranks=2, tp=1)
        assert sorted(i for order in call["orders"] for i in order) == list(range(NUM_SAMPLES))
        assert [len(order) for order in call["orders"]] == [16, 16]
        (call,) = flatflow.orders([tokens], global_batch_size=NUM_SAMPLES, num_slots=5, num_ranks=2, tp=1)
        assert call["error"] == "32 samples are not equally many in 5 microbatches of 2 ranks"
        rows = flatflow_rows(board, board.dflop(), board.dflop(), flatflow)
        assert {row.count for row in rows} == {"plan's", "own"}
        assert all(len(row.ratio) == 2 for row in rows)


def test_what_is_not_installed_is_told(monkeypatch, tmp_path, board):
    monkeypatch.setattr(packages, "FLATFLOW", packages.CLIENTS / "nowhere")
    monkeypatch.setattr(packages, "GALVATRON", packages.CLIENTS / "nowhere")
    with pytest.raises(RuntimeError, match=r"not installed in .*nowhere \(make rivals\)"):
        FlatFlow(make_specs()[-1])
    assert galvatron_import().startswith("not installed in")
    (row,) = flatflow_rows(board, board.dflop(), board.dflop(), "not installed")
    assert (row.ratio, row.note) == ([], "not installed")


def test_a_package_that_cannot_be_imported_says_why(monkeypatch, tmp_path):
    inside = tmp_path / "galvatron" / "core" / "search_engine"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("import no_such_thing\n")
    monkeypatch.setattr(packages, "GALVATRON", tmp_path)
    assert galvatron_import() == "ModuleNotFoundError: No module named 'no_such_thing'"
    (inside / "__init__.py").write_text("")
    assert galvatron_import() == ""


def test_cells_without_a_table_are_generated_and_seen_by_the_family():
    assert {c.data.name for c in cells(None, is_full=False)} == {"generated, main", "generated, tails"}
    assert not [c for c in cells(None, is_full=True) if "Audio" in c.model]


def test_batches_to_plan_for_and_to_judge_on_are_different():
    cell = next(c for c in cells(None, is_full=False) if isinstance(c, Cell))
    problem, unseen = cell.problem(1)
    again, _ = cell.problem(1)
    assert problem.batches == again.batches
    seen = {s.num_llm_tokens for s in problem.batches[0]}
    assert seen != {s.num_llm_tokens for s in unseen[0]}


def _content() -> dict[str, Any]:
    def row(**changes: Any) -> dict[str, Any]:
        return dataclasses.asdict(
            dataclasses.replace(Row("batch", "peer", "origin", "model", "data", "dflop", "own"), **changes)
        )

    rows = [
        row(peer="slower", ratio=[1.2, 1.3], decide_s=0.5, dflop_decide_s=0.1),
        row(peer="wins once", ratio=[1.6, 0.9], num_over_memory=1, decide_s=0.5, dflop_decide_s=0.1),
        row(peer="equal", ratio=[1.0, 1.0], decide_s=0.5, dflop_decide_s=0.1),
        row(peer="absent", note="a | b"),
    ]
    return {"cells": [{"model": "model", "data": "data", "rows": rows}], "galvatron": galvatron_row("no apex")}


def test_rows_in_which_dflop_is_not_better_come_first():
    content = json.loads(json.dumps(_content()))  # as a file has it
    lines = [line.split(" | ") for line in tables(content)["peers"].splitlines()[2:]]
    assert [line[0] for line in lines] == ["| equal", "| wins once", "| slower", "| absent", "| planner: Galvatron"]
    assert lines[0][6] == "0 / 2 of 2"
    assert (lines[1][4:8]) == ["1.200", "0.900", "1 / 0 of 2", "1"]
    assert lines[3][4] == r"no result: a \| b"
    assert "its search engine cannot be imported: no apex" in lines[4][4]
    every = [line.split(" | ")[0] for line in tables(content)["peers-all"].splitlines()[2:]]
    assert every == ["| equal", "| wins once", "| slower", "| absent"]
    assert text(content).splitlines()[1].startswith("peer")
