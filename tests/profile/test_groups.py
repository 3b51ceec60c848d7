from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.profile.groups import KINDS, make_group, probe_groups, random_groups
from dflop.records import LLM
from tests.builders import random_batch

MODULES = ("vision", "audio", LLM)


def groups_of(module, *, num_groups=24, seed=0, shapes=None):
    shapes = random_batch(300, seed=seed) if shapes is None else shapes
    return probe_groups(shapes, module, num_groups=num_groups, max_samples=12, seed=seed)


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


def design_of(groups):
    rows = [(1, g.load.num_tokens, g.load.sum_sq_tokens, g.load.num_items) for g in groups]
    return np.array(rows, dtype=float)


def condition(groups):
    """Condition number of the fit's design matrix, columns scaled to length one."""
    design = design_of(groups)
    return float(np.linalg.cond(design / np.linalg.norm(design, axis=0)))


def square_error(groups):
    """Standard error of the seconds per squared token where every timing has the same relative error."""
    design = design_of(groups)
    weighted = design / (design @ np.array([1e-3, 1e-5, 1e-9, 1e-5]))[:, None]
    return float(np.sqrt(np.linalg.inv(weighted.T @ weighted)[2, 2]))


@pytest.mark.parametrize("module", MODULES)
def test_cost_terms_can_be_told_apart_better_than_in_random_groups(module):
    mixed, only_random = [], []
    for seed in range(6):
        some, many = (groups_of(module, seed=seed, num_groups=n) for n in (24, 24 * len(KINDS)))
        for found, groups in ((mixed, some), (only_random, [g for g in many if g.kind == "random"])):
            found.append((condition(groups), square_error(groups)))
    assert (np.median(mixed, axis=0) < 0.95 * np.median(only_random, axis=0)).all()
    assert max(first for first, _ in mixed) < 50


def test_microbatches_of_the_data_follow_the_weights():
    shapes = [dataclasses.replace(s, weight=3.0 if s.sample_index % 2 else 1.0) for s in random_batch(40, seed=0)]
    groups = random_groups(shapes, LLM, 400, max_samples=8, seed=0)
    assert {len(g.samples) for g in groups} == set(range(1, 9))
    drawn = [s.sample_index % 2 for g in groups for s in g.samples]
    assert np.mean(drawn) == pytest.approx(0.75, abs=0.05)
    assert random_groups(random_batch(5, encoders=(), seed=0), "vision", 4, max_samples=2, seed=0) == ()
