"""All peers in one cell: batchers on dflop's plan and on the tuned uniform one, over the epoch, and planners."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dflop.errors import InfeasiblePlanError
from dflop.jobs.suite.judge import judge
from dflop.plan.baselines.reference import argmin, literal, reference_plan
from dflop.plan.baselines.uniform import default_plan, tuned_uniform
from dflop.plan.rank import arrival_step_s, scheduled_step_s
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, SampleShape
from dflop.schedule.assignment import in_sequence
from dflop.schedule.items import Ints
from tests.bench.peers.batchers import Place, batchers, buckets_to_place, weights_of
from tests.bench.peers.board import Board, Result, Row, best_count, ratios, told
from tests.bench.peers.cases import Cell
from tests.bench.peers.packages import FlatFlow, length_grouped_order, package
from tests.bench.peers.packing import fitted_first_fit
from tests.bench.schedule.rivals import cp_sat

Say = Callable[[str], None]
T = TypeVar("T")
CP_SAT_WORKERS = 2
MEGATRON = "re-expressed: every uniform (tp, pp, dp) and count, as Megatron-LM lays models out"
REFERENCE = "re-expressed: DFLOP at 60e86d8"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run is made of: results of others are not joined to it."""

    num_batches: int
    cp_sat_limit_s: float
    num_cp_sat: int
    """Batches of each cell that CP-SAT is tried on."""


def run_cell(cell: Cell, settings: Settings, flatflow: FlatFlow | str, say: Say) -> dict[str, Any]:
    """Rows of a cell, as the file has them.

    Args:
        cell: Family and mixture.
        settings: Sizes.
        flatflow: The package, or why it does not run.
        say: Told what happens.
    """
    problem, unseen = cell.problem(settings.num_batches)
    plans = make_plans(problem)
    ours, plan_s = plans["dflop"]
    assert ours is not None, "dflop's planner raises where nothing fits"
    say(f"{cell.name}: planned, {plan_s:.1f} s")
    rows: list[Row] = []
    steps: dict[str, Result] = {}
    for on in ("dflop", "uniform"):
        plan = plans[on][0]
        if plan is None:
            continue
        board = Board(problem, plan, unseen)
        base = steps[on] = board.dflop()
        own_base = base if on == "dflop" else board.dflop_with_own_count()
        found = [*batch_rows(board, base, own_base), *flatflow_rows(board, base, own_base, flatflow)]
        if on == "dflop":
            found += [cp_sat_row(board, base, settings)]
        found += epoch_rows(problem, board, base, flatflow)
        rows += [dataclasses.replace(row, on=on, dflop_decide_s=base.decide_s) for row in found]
        say(f"{cell.name}: batchers on the plan of {on}")
    rows += [dataclasses.replace(row, dflop_decide_s=plan_s) for row in plan_rows(problem, plans, unseen, steps)]
    say(f"{cell.name}: planners")
    return {
        "model": cell.model,
        "data": cell.data.name,
        "plans": {name: told(plan) for name, (plan, _) in plans.items() if plan},
        "dflop_step_s": {on: result.step_s for on, result in steps.items()},
        "rows": [_as_json(dataclasses.replace(row, model=cell.model, data=cell.data.name)) for row in rows],
    }  # fmt: skip


def _as_json(row: Row) -> dict[str, Any]:
    """Seconds that nobody took are null."""
    found = dataclasses.asdict(row)
    return {name: None if value != value else value for name, value in found.items()}


def make_plans(problem: Problem) -> dict[str, tuple[Plan | None, float]]:
    """By planner: its plan and the seconds it took; None where it has none."""
    return {
        "dflop": _timed(lambda: plan_problem(problem)[0]),
        "uniform": _timed(lambda: tuned_uniform(problem, lambda plan: arrival_step_s(problem, plan))),
        "uniform, our batches": _timed(lambda: tuned_uniform(problem, lambda plan: scheduled_step_s(problem, plan))),
        "default": _timed(lambda: default_plan(problem)),
        "reference": _timed(lambda: reference_plan(problem, literal).plan),
        "reference, rule mended": _timed(lambda: reference_plan(problem, argmin).plan),
    }


def _timed(make: Callable[[], Plan | None]) -> tuple[Plan | None, float]:
    started = time.perf_counter()
    try:
        plan = make()
    except InfeasiblePlanError:
        plan = None
    return plan, time.perf_counter() - started


def batch_rows(board: Board, base: Result, own_base: Result) -> list[Row]:
    """Every batcher with the plan's count, beside `base`, and with the one that suits it best, beside `own_base`."""
    rows = []
    for peer in batchers():
        if peer.counts_itself:
            result = board.run(board.plan.num_microbatches, peer.decide, counts_itself=True)
            rows.append(_row("batch", peer.name, peer.origin, "packed", result, own_base))
            continue
        results = {m: board.run(m, peer.decide) for m in board.counts()}
        rows += _both_counts(peer.name, peer.origin, results, board, base, own_base)
    return rows


def flatflow_rows(board: Board, base: Result, own_base: Result, flatflow: FlatFlow | str) -> list[Row]:
    """FlatFlow keeping the global batch."""
    if isinstance(flatflow, str):
        return [_absent("batch", "FlatFlow, stable", "package flatflow", flatflow)]
    origin, results, refused = f"package flatflow {flatflow.version}", {}, ""
    for m in board.counts():
        found = _flatflow(board, flatflow, m, board.num_tokens)
        if isinstance(found, str):
            refused = refused or found
            continue
        judged = [board.judged(m, k, place) for k, (place, _) in enumerate(found)]
        results[m] = Result(
            [s for s, _ in judged], sum(not fits for _, fits in judged), statistics.median(s for _, s in found)
        )
    if not results:
        return [_absent("batch", "FlatFlow, stable", origin, refused)]
    return _both_counts("FlatFlow, stable", origin, results, board, base, own_base)


def _flatflow(
    board: Board, flatflow: FlatFlow, count: int, tokens: Sequence[Ints], *, is_stable: bool = True
) -> list[tuple[Place, float]] | str:
    """(slot and rank of each call's samples, seconds), slots counted through; or why there is none."""
    size = len(board.batches[0])
    found = flatflow.orders(
        tokens, global_batch_size=size, num_slots=count, num_ranks=board.num_ranks,
        tp=board.plan.module(LLM).parallel.tp, is_stable=is_stable,
    )  # fmt: skip
    for call in found:
        if "error" in call:
            return str(call["error"])
    each = size // (count * board.num_ranks)
    places = []
    for call, num in zip(found, (len(t) for t in tokens), strict=True):
        slot, rank = np.full((2, num), -1, dtype=np.int64)
        for r, order in enumerate(call["orders"]):
            slot[order], rank[order] = np.arange(len(order)) // each, r
        if (slot < 0).any():
            return "left samples out"
        places.append(((slot, rank), float(call["seconds"])))
    return places


def cp_sat_row(board: Board, base: Result, settings: Settings) -> Row:
    """The reference's program on the first batches; without its second try of 100 s."""
    name, found, seconds, ours, over = "CP-SAT, reference's program", [], [], [], 0
    told_statuses = []
    for k in range(min(settings.num_cp_sat, len(board.batches))):
        job = board.job(board.plan.num_microbatches, k)
        answer = cp_sat(weights_of(job), job.num_buckets, settings.cp_sat_limit_s, CP_SAT_WORKERS)
        if answer["status"] == "not installed":
            return _absent("batch", name, "package ortools", "not installed in .venv/clients/ortools (make rivals)")
        told_statuses.append(f"{answer['status'].lower()} in {settings.cp_sat_limit_s:g} s")
        seconds.append(float(answer["build_s"]) + float(answer["solve_s"]))
        if answer["bucket"] is not None:
            place = buckets_to_place(np.array(answer["bucket"], dtype=np.int64), board.num_ranks)
            step_s, fits = board.judged(board.plan.num_microbatches, k, place)
            found.append(step_s)
            ours.append(base.step_s[k])
            over += not fits
    row = _absent("batch", name, "package ortools", ", ".join(sorted(set(told_statuses))))
    return dataclasses.replace(
        row, count="plan's", ratio=ratios(found, ours), num_over_memory=over, decide_s=statistics.median(seconds)
    )


def epoch_rows(problem: Problem, board: Board, base: Result, flatflow: FlatFlow | str) -> list[Row]:
    """Peers that deal samples over all batches at once: time of the epoch over ours on the same samples.

    They change which samples make a global batch, and so what is learnt.
    """
    pool = [sample for batch in board.batches for sample in batch]
    tokens = np.array([s.num_llm_tokens for s in pool], dtype=np.int64)
    size, m, ranks = problem.global_batch_size, board.plan.num_microbatches, board.num_ranks
    rows, name = [], "length-grouped over the epoch"
    started = time.perf_counter()
    order = length_grouped_order(tokens, size // ranks, seed=0)
    seconds = time.perf_counter() - started
    parts = [(order[k : k + size], in_sequence(np.arange(size), board.plan)) for k in range(0, len(pool), size)]
    origin = package("transformers") + ", LengthGroupedSampler"
    rows.append(_epoch_row(name, origin, problem, board, pool, parts, base, seconds))

    started = time.perf_counter()
    bins = fitted_first_fit(tokens, m * ranks * len(board.batches))
    seconds = time.perf_counter() - started
    shuffled = np.random.default_rng(0).permutation(m * ranks * len(board.batches))[bins]
    parts = []
    for k in range(len(board.batches)):
        mine = np.flatnonzero(shuffled // (m * ranks) == k)
        parts.append((mine, buckets_to_place(shuffled[mine] % (m * ranks), ranks)))
    origin = "re-expressed: Johnson 1973; packs are shuffled, equally many to a step"
    rows.append(_epoch_row("first fit decreasing over the epoch", origin, problem, board, pool, parts, base, seconds))

    name = "FlatFlow over the epoch"
    if isinstance(flatflow, str):
        return [*rows, _absent("epoch", name, "package flatflow", flatflow)]
    origin = f"package flatflow {flatflow.version}, unstable"
    found = _flatflow(board, flatflow, m, [tokens], is_stable=False)
    if isinstance(found, str):
        return [*rows, _absent("epoch", name, origin, found)]
    (slot, rank), seconds = found[0]
    parts = []
    for k in range(len(board.batches)):
        mine = np.flatnonzero(slot // m == k)
        parts.append((mine, (slot[mine] % m, rank[mine])))
    return [*rows, _epoch_row(name, origin, problem, board, pool, parts, base, seconds)]


def _epoch_row(
    name: str, origin: str, problem: Problem, board: Board, pool: Sequence[SampleShape],
    parts: Sequence[tuple[Ints, Place]], base: Result, seconds: float,
) -> Row:  # fmt: skip
    """`parts`: per step the samples and where they are."""
    assert sorted(i for mine, _ in parts for i in mine.tolist()) == list(range(len(pool))), "an epoch has every sample"
    theirs = Board(problem, board.plan, [tuple(pool[i] for i in mine.tolist()) for mine, _ in parts])
    judged = [theirs.judged(board.plan.num_microbatches, k, place) for k, (_, place) in enumerate(parts)]
    over = sum(not fits for _, fits in judged)
    row = _row("epoch", name, origin, "plan's", Result([sum(s for s, _ in judged)], over, seconds / len(parts)), None)
    return dataclasses.replace(row, ratio=ratios([sum(s for s, _ in judged)], [sum(base.step_s)]))


def plan_rows(
    problem: Problem, plans: dict[str, tuple[Plan | None, float]], unseen: Sequence[Sequence[SampleShape]],
    steps: dict[str, Result],
) -> list[Row]:  # fmt: skip
    """Every planner's plan under dflop's scheduler and under its own: arrival order, or the reference's objective."""
    rivals = (
        ("uniform", MEGATRON + "; tuned in arrival order", "arrival"),
        ("uniform, our batches", MEGATRON + "; tuned under dflop's scheduler", ""),
        ("default", "re-expressed: largest tp, least pp that fits, one sample a microbatch", "arrival"),
        ("reference", REFERENCE + ", its literal rule", "bottleneck"),
        ("reference, rule mended", REFERENCE + ", the fastest by its formula", "bottleneck"),
    )  # fmt: skip
    rows = []
    for name, origin, habit in rivals:
        plan, seconds = plans[name]
        if plan is None:
            why = "none fits, or the model has not just one encoder"
            rows.append(_absent("plan", f"planner: {name}", origin, why))
            continue
        for on, policy in (("dflop", "balanced"), ("own", habit)):
            if not policy:
                continue
            found = judge(plan, unseen, problem.cost, problem.cluster, policy)
            fits = all(p <= problem.usable_bytes for part in plan.modules for p in part.stage_memory_bytes)
            result = Result(list(found.step_s), found.num_over_cap if fits else len(unseen), seconds)
            row = _row("plan", f"planner: {name}", origin, "plan's", result, steps["dflop"])
            rows.append(dataclasses.replace(row, on=on))
    return rows


def _both_counts(
    name: str, origin: str, results: dict[int, Result], board: Board, base: Result, own_base: Result
) -> list[Row]:
    own, given = best_count(results), board.plan.num_microbatches
    rows = [_row("batch", name, origin, "plan's", results[given], base)] if given in results else []
    row = _row("batch", name, origin, "own", results[own], own_base)
    return [*rows, dataclasses.replace(row, note=f"{own} microbatches; the plan has {given}")]


def _row(kind: str, peer: str, origin: str, count: str, result: Result, base: Result | None) -> Row:
    found = ratios(result.step_s, base.step_s) if base else []
    return Row(kind, peer, origin, "", "", "", count, found, result.num_over_memory, result.decide_s)


def _absent(kind: str, peer: str, origin: str, why: str) -> Row:
    return Row(kind, peer, origin, "", "", "", "plan's", note=why)
