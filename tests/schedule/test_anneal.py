import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.anneal import score, search
from dflop.schedule.linear import LinearStep
from dflop.schedule.state import exact, make_task
from dflop.simulate.order import actions
from dflop.simulate.step import EXPOSED_FRAC
from tests.schedule.steps import keeps_caps, linear_steps, llm_step
from tests.simulate.graph import OpGraph, simulate


def find(step: LinearStep, seeds, **how):
    return search(make_task(step), seeds, depth=int(step.num_after.max()) + 1, **how)


def makespan_slowly(step: LinearStep, bucket) -> float:
    """The linear step as an operation graph: encoders of one rank, each slot waiting for all of its buckets.

    Ranks that meet wait for what any of them waits for, and take as long as the slowest of them, module by module.
    """
    nodes = [(p, s, r) for p, pp in enumerate(step.pipe_pp) for s in range(pp) for r in range(num_ranks_of(step, p))]
    index, llm = {node: i for i, node in enumerate(nodes)}, len(step.pipe_pp) - 1
    first_stage = np.concatenate([[0], np.cumsum(step.pipe_pp)])
    samples = {b: np.flatnonzero(bucket == b) for b in range(step.num_slots * step.num_ranks)}
    seconds, depends, orders = {}, {}, []

    def op(node, k, phase):
        return 2 * (index[node] * step.num_slots + k) + phase

    for p, s, r in nodes:
        stage = first_stage[p] + s
        parts, after = step.stage_parts[stage], int(step.num_after[stage])
        orders.append(tuple(op((p, s, r), a.microbatch, int(a.phase == "B")) for a in actions(step.num_slots, after)))
        group = max(part.group for part in parts) if p == llm else 1
        others = range(r - r % group, min(r - r % group + group, num_ranks_of(step, p)))
        for k in range(step.num_slots):
            took = [
                sum(of) for of in zip(*(part_s(step, part, p == llm, samples, k, r) for part in parts), strict=True)
            ]
            before, behind = [], []
            for q in others if sum(took) else ():
                mine = samples[k * step.num_ranks + q] if p == llm else np.concatenate(
                    [samples[k * step.num_ranks + lane] for lane in range(step.num_ranks)]
                )  # fmt: skip
                active = len(mine) > 0 if p == llm else step.num_items[p][mine].sum() > 0
                fed = [
                    lane for lane in range(step.num_ranks)
                    if p != llm and step.num_items[p][samples[k * step.num_ranks + lane]].sum() > 0
                ]  # fmt: skip
                if active and s > 0:
                    before.append(op((p, s - 1, q), k, 0))
                elif active and p == llm:
                    before += [
                        op((e, step.pipe_pp[e] - 1, 0), k, 0) for e in range(llm) if step.num_items[e][mine].sum() > 0
                    ]
                if active and s < step.pipe_pp[p] - 1:
                    behind.append(op((p, s + 1, q), k, 1))
                elif active and p != llm:
                    behind += [op((llm, 0, lane), k, 1) for lane in fed]
            for phase, waits in ((0, before), (1, behind)):
                seconds[op((p, s, r), k, phase)] = took[phase]
                depends[op((p, s, r), k, phase)] = tuple(waits)
    ops = range(len(seconds))
    return simulate(OpGraph(tuple(orders), tuple(seconds[o] for o in ops), tuple(depends[o] for o in ops))).makespan_s


def part_s(step, part, is_chain, samples, k, r) -> tuple[float, float]:
    """(forward, backward) seconds of a part of a stage in a slot, on rank r of the chain or on the encoder."""
    buckets = [samples[k * step.num_ranks + q] for q in range(step.num_ranks)]
    if not is_chain:
        inside, (pipe, row) = np.concatenate(buckets), (part.row // 2, part.row)
        if not step.num_items[pipe][inside].sum():
            return 0.0, 0.0
        total = max(float(step.slot_s[row][inside].sum()), float(step.largest_s[row][inside].max())) + part.fixed_s
        return with_messages_s(part, 0.25 * total, 0.75 * total)
    of_ranks = []
    for q, b in enumerate(buckets):
        again = sum(int(step.tokens[b].sum()) > limit for limit in part.limits)
        took = (float(step.chain_s[part.row][b].sum()) + part.fixed_s) * bool(len(b))
        rerun_s = again * (float(step.rerun_s[b].sum()) + step.rerun_fixed_s) if again else 0.0
        both = 0.25 * took, 0.75 * took + rerun_s
        of_ranks.append([float(step.chain_slowness[part.row, q]) * phase_s for phase_s in both])
    if part.group == 1:
        return with_messages_s(part, *of_ranks[r]) if len(buckets[r]) else (0.0, 0.0)
    if not np.any(of_ranks):
        return 0.0, 0.0
    forward_s, backward_s = np.max(of_ranks[r - r % part.group :][: part.group], axis=0).tolist()
    return with_messages_s(part, forward_s, backward_s)


def with_messages_s(part, forward_s, backward_s) -> tuple[float, float]:
    messages = (part.gather_s, part.gather_s + part.scatter_s)
    return tuple(max(s + EXPOSED_FRAC * m, m) for s, m in zip((forward_s, backward_s), messages, strict=True))


def num_ranks_of(step: LinearStep, pipe: int) -> int:
    return step.num_ranks if pipe == len(step.pipe_pp) - 1 else 1


@settings(max_examples=50, deadline=None)
@given(linear_steps(), st.integers(0, 1000))
def test_compiled_score_is_the_simulated_step_within_the_caps(step, seed):
    bucket = np.random.default_rng(seed).integers(step.num_slots * step.num_ranks, size=len(step.tokens))
    found = score(make_task(step), bucket)
    assert found == (makespan_slowly(step, bucket) if keeps_caps(step, bucket) else np.inf)


@pytest.mark.budget(60, "a kernel that is compiled where nothing was warmed")
@settings(max_examples=30, deadline=None)
@given(linear_steps(is_capped=False), st.integers(0, 60))
def test_search_is_never_worse_than_its_seeds_and_repeats(step, num_moves):
    step = dataclasses.replace(step, cap_tokens=int(step.tokens.sum()))
    step = dataclasses.replace(step, cap_in_flight_tokens=step.cap_tokens)
    seed = np.zeros(len(step.tokens), dtype=np.int64)
    found = find(step, [seed], num_profiles=3, num_moves=num_moves)[0]
    assert makespan_slowly(step, found) <= makespan_slowly(step, seed)
    again = find(step, [seed], num_profiles=3, num_moves=num_moves)[0]
    assert found.tolist() == again.tolist()


@settings(max_examples=20, deadline=None)
@given(linear_steps(), st.integers(1, 200), st.integers(0, 1000))
def test_annealing_keeps_all_caps_of_a_start_that_does(step, num_moves, seed):
    start = np.random.default_rng(seed).integers(step.num_slots * step.num_ranks, size=len(step.tokens))
    step = tight_around(step, start)
    assert keeps_caps(step, start)
    found = find(step, [start], num_profiles=3, num_moves=num_moves)
    assert all(keeps_caps(step, bucket) for bucket in found)


def tight_around(step, bucket):
    """The step with caps that an assignment just keeps."""
    tokens = np.bincount(bucket, step.tokens, step.num_slots * step.num_ranks).reshape(step.num_slots, step.num_ranks)
    windows = [tokens[k : k + step.window].sum(axis=0).max() for k in range(step.num_slots - step.window + 1)]
    where = bucket if step.on_chain.any() else bucket // step.num_ranks
    return dataclasses.replace(
        step,
        cap_tokens=int(tokens.max()),
        cap_in_flight_tokens=int(max(windows)),
        cap_media_tokens=np.array([int(np.bincount(where, row).max()) for row in step.media_tokens], dtype=np.int64),
    )


def test_more_moves_find_a_shorter_step():
    step = long_step()
    values = [makespan_slowly(step, find(step, [], num_profiles=1, num_moves=n)[0]) for n in (0, 300, 3000)]
    assert values[0] > values[1] > values[2]


@given(st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=50), st.randoms())
def test_exact_seconds_are_the_same_seconds_and_add_up_in_any_order(seconds, random):
    given_s = np.array(seconds)
    found = exact(given_s)
    assert np.abs(found - given_s).max() <= 1e-15 * given_s.sum()
    shuffled = list(found)
    random.shuffle(shuffled)
    forth, back = sum(shuffled), 0.0
    assert forth == sum(found)
    for part in (*shuffled, *(-x for x in found)):
        back += part
    assert back == 0.0


def long_step() -> LinearStep:
    seconds = np.round(8 * np.random.default_rng(0).lognormal(0, 1, 64)) / 8 + 0.125
    return llm_step(seconds, np.ones(64, dtype=np.int64), num_slots=8, num_ranks=2, pp=4, fixed_s=0.125)
