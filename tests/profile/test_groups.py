from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.cost.curve_fit import choose_knots, fit_terms, predict
from dflop.cost.probes import Probes
from dflop.profile.groups import KINDS, drawn_groups, make_group, probe_groups
from dflop.records import LLM
from tests.builders import random_batch
from tests.gpu.drawn import random_groups

MODULES = ("vision", "audio", LLM)


def groups_of(module, *, num_groups=24, seed=0, shapes=None, draw=drawn_groups):
    shapes = random_batch(300, seed=seed) if shapes is None else shapes
    return draw(shapes, module, num_groups=num_groups, max_samples=12, seed=seed)


@pytest.mark.parametrize("module", MODULES)
def test_all_kinds_occur_and_load_and_items_are_those_of_the_samples(module):
    groups = groups_of(module)
    assert [g.kind for g in groups] == [KINDS[i % len(KINDS)] for i in range(24)]
    assert all(g.load.num_tokens > 0 for g in groups)
    assert all(1 <= len(g.samples) <= 12 for g in groups)
    assert all(len(g.samples) == 1 for g in groups if g.kind == "single")
    assert all(len({s.sample_index for s in g.samples}) == len(g.samples) for g in groups)
    for g in groups:
        items = [i for s in g.samples for i in s.items if i.module == module]
        assert list(g.items) == items
        tokens = [s.num_llm_tokens for s in g.samples] if module == LLM else [i.num_tokens for i in items]
        num_items = sum(s.num_supervised_tokens for s in g.samples) if module == LLM else len(items)
        assert (g.load.num_items, g.load.num_tokens) == (num_items, sum(tokens))
        assert g.load.sum_sq_tokens == sum(t * t for t in tokens)


def test_the_seed_fixes_the_groups():
    shapes = random_batch(100, seed=1)
    assert groups_of(LLM, seed=3, shapes=shapes) == groups_of(LLM, seed=3, shapes=shapes)
    assert groups_of(LLM, seed=3, shapes=shapes) != groups_of(LLM, seed=4, shapes=shapes)


def test_small_and_unused_data():
    for num_samples in (1, 2, 3):
        assert all(g.samples for g in groups_of(LLM, shapes=random_batch(num_samples, seed=0)))
    one = random_batch(1, encoders=(), seed=0)
    assert groups_of("vision", shapes=one) == ()
    assert make_group("single", one, "vision").load.num_tokens == 0


@pytest.mark.parametrize("module", MODULES)
@given(num_samples=st.integers(1, 5), max_samples=st.integers(1, 3), num_groups=st.integers(4, 9))
def test_groups_of_samples_that_are_all_alike_are_of_two_sizes(module, num_samples, max_samples, num_groups):
    shapes = [s for s in random_batch(30, seed=0) if s.load(module).num_tokens][:1] * num_samples
    groups = probe_groups(shapes, module, num_groups=num_groups, max_samples=max_samples, seed=0)
    assert len(groups) == num_groups
    assert len({g.load.num_tokens for g in groups}) > 1


def test_the_grid_begins_with_the_ends_and_has_no_group_twice():
    grid = groups_of(LLM, draw=probe_groups)
    sizes = [g.load.num_tokens for g in groups_of(LLM, num_groups=96)]
    assert [g.load.num_tokens for g in grid[:2]] == [min(sizes), max(sizes)]
    assert len({g.load for g in grid}) == len(grid) == 24
    assert groups_of(LLM, num_groups=1, draw=probe_groups)[0].load.num_tokens == min(
        g.load.num_tokens for g in groups_of(LLM, num_groups=4)
    )


DEPTHS, NUM_LAYERS = (2, 4), 28


def true_seconds(num_layers, load, bend):
    """A layer whose slope falls at 1500 tokens and rises at 400 where `bend` is 1; straight where it is 0."""
    tokens = load.num_tokens
    layer = 2e-4 + 1e-6 * tokens + 2e-10 * load.sum_sq_tokens
    layer += bend * (4e-7 * min(tokens, 1500) - 2e-7 * min(tokens, 400))
    return num_layers * layer + 5e-4 + 1.5e-6 * tokens + 1e-5 * load.num_items


def errors_at_full_depth(groups, held_out, bend, seed):
    """(median, 95th percentile) of a fit to shallow probes: of a shape's own 2 % and noise of 0.5 %."""
    rng = np.random.default_rng(seed)

    def probes(groups, depths, noise_frac):
        rows = []
        for load in (g.load for g in groups):
            own = rng.normal(0, 0.02)
            for n in depths:
                s = true_seconds(n, load, bend) * np.exp(own + rng.normal(0, noise_frac))
                rows.append((n, load.num_items, load.num_tokens, load.sum_sq_tokens, s / 3, 2 * s / 3, 1.0))
        return Probes(*np.array(rows, dtype=float).T)

    timed, wanted = probes(groups, DEPTHS, 0.005), probes(held_out, [NUM_LAYERS], 0.0)
    terms = fit_terms(timed, timed.seconds, choose_knots(timed)[0])
    error = np.abs(predict(terms, wanted) / wanted.seconds - 1)
    return np.median(error), np.quantile(error, 0.95)


def test_a_grid_predicts_better_than_as_many_groups_as_drawn_or_at_random():
    found = []
    for module, bend, seed in itertools.product(("vision", LLM), (0.0, 1.0), range(8)):
        shapes = random_batch(400, seed=seed)
        drawn = groups_of(module, num_groups=9 * len(KINDS), seed=seed, shapes=shapes)
        grid = groups_of(module, num_groups=9, seed=seed, shapes=shapes, draw=probe_groups)
        held_out = random_groups(shapes, module, 100, max_samples=12, seed=seed + 500)
        for groups in (grid, drawn[:9], drawn[:: len(KINDS)]):
            found.append(errors_at_full_depth(groups, held_out, bend, seed))
    errors, *others = (np.mean(found[i::3], axis=0) for i in range(3))
    assert all((errors < 0.95 * other).all() for other in others), "median and 95th percentile"
    assert errors[0] < 0.025
