from __future__ import annotations

import numpy as np
import pytest

from dflop.cost.curve_fit import choose_knots, fit_terms, predict
from dflop.cost.probes import Probes
from dflop.profile.adaptive import Design
from dflop.profile.groups import probe_groups, random_groups
from dflop.records import LLM, ModuleLoad
from tests.builders import random_batch

DEPTHS, NUM_LAYERS, NUM_GROUPS = (1, 2), 28, 18


def true_seconds(num_layers, load, bend):
    """A layer whose slope falls at 1500 tokens and rises at 400 where `bend` is 1; straight where it is 0."""
    tokens = load.num_tokens
    layer = 2e-4 + 1e-6 * tokens + 2e-10 * load.sum_sq_tokens
    layer += bend * (4e-7 * min(tokens, 1500) - 2e-7 * min(tokens, 400))
    return num_layers * layer + 5e-4 + 1.5e-6 * tokens + 1e-5 * load.num_items


class Machine:
    """Answers probes: the true curve, a deviation that belongs to the shape, and noise."""

    def __init__(self, seed, bend, shape_frac, noise_frac):
        self.rng, self.bend, self.noise_frac = np.random.default_rng(seed), bend, noise_frac
        self.shape_frac, self.deviations = shape_frac, {}

    def without_noise(self, num_layers, load):
        if load not in self.deviations:
            self.deviations[load] = float(np.exp(self.rng.normal(0, self.shape_frac)))
        return true_seconds(num_layers, load, self.bend) * self.deviations[load]

    def time(self, num_layers, load):
        return self.without_noise(num_layers, load) * float(np.exp(self.rng.normal(0, self.noise_frac)))


def probes_of(rows):
    """`Probes` of (layers, load, seconds); a third of the seconds is forward."""
    table = [(n, x.num_items, x.num_tokens, x.sum_sq_tokens, s / 3, 2 * s / 3, 1.0) for n, x, s in rows]
    return Probes(*np.array(table, dtype=float).T)


def groups_of(shapes, module, num_groups, seed):
    return [g.load for g in probe_groups(shapes, module, num_groups=num_groups, max_samples=12, seed=seed)]


def design_of(shapes, module, seed):
    pool = groups_of(shapes, module, 4 * NUM_GROUPS, seed)
    targets = [g.load for g in random_groups(shapes, module, 64, max_samples=12, seed=seed)]
    return Design(DEPTHS, [(load, load) for load in pool], NUM_LAYERS, targets), pool


def adaptive_rows(machine, shapes, module, seed, num_groups):
    design, pool = design_of(shapes, module, seed)
    rows = []
    for _ in range(num_groups):
        index = design.next()
        seconds = [machine.time(n, pool[index]) for n in DEPTHS]
        rows += [(n, pool[index], s) for n, s in zip(DEPTHS, seconds, strict=True)]
        design.take(index, seconds, machine.noise_frac)
    return rows, design


def errors_at_full_depth(machine, rows, held_out):
    """(median, 95th percentile) of the relative errors of the fit to `rows`."""
    probes = probes_of(rows)
    wanted = probes_of([(NUM_LAYERS, x, machine.without_noise(NUM_LAYERS, x)) for x in held_out])
    terms = fit_terms(probes, probes.seconds, choose_knots(probes)[0])
    error = np.abs(predict(terms, wanted) / wanted.seconds - 1)
    return np.array([np.median(error), np.quantile(error, 0.95)])


def compare(module, bend, seed):
    """Errors `[3, 2]` of all of a grid, of the probes chosen, and of as many drawn from the grid."""
    shapes = random_batch(400, seed=seed)
    machine = Machine(seed, bend, shape_frac=0.02, noise_frac=0.005)
    held_out = [g.load for g in random_groups(shapes, module, 100, max_samples=12, seed=seed + 500)]
    grid = [(n, x, machine.time(n, x)) for x in groups_of(shapes, module, NUM_GROUPS, seed + 100) for n in DEPTHS]
    chosen, _ = adaptive_rows(machine, shapes, module, seed, NUM_GROUPS * 2 // 5)
    assert len(chosen) <= 0.4 * len(grid)
    some = np.random.default_rng(seed).permutation(NUM_GROUPS)[: len(chosen) // 2]
    fewer = [row for i in some for row in grid[2 * i : 2 * i + 2]]
    return [errors_at_full_depth(machine, rows, held_out) for rows in (grid, chosen, fewer)]


@pytest.mark.lane("instances")
def test_two_fifths_of_the_probes_come_close_to_all_of_a_grid():
    cases = [(module, bend, seed) for module in ("vision", LLM) for bend in (0.0, 1.0) for seed in range(16)]
    grid, chosen, fewer = np.mean([compare(*case) for case in cases], axis=0)
    assert (chosen < 1.2 * grid).all(), "median and 95th percentile"
    assert (chosen < 0.85 * fewer).all(), "as many probes without a choice are worse"


def test_no_group_twice_and_none_that_was_dropped():
    design, pool = design_of(random_batch(100, seed=0), LLM, 0)
    most = sorted(design.num_tokens)[len(pool) // 2]
    design.drop(most)
    taken = []
    while (index := design.next()) is not None:
        taken.append(index)
        design.take(index, [true_seconds(n, pool[index], 0.0) for n in DEPTHS], 0.01)
    assert sorted(taken) == [i for i, n in enumerate(design.num_tokens) if n < most]
    assert design.num_tokens[taken[0]] == min(design.num_tokens)
    assert design.first() is None


def test_the_cheapest_groups_are_not_all_of_one_size():
    sizes = [24] * 8 + [48, 96]
    loads = [(ModuleLoad(1, n, n * n),) * 2 for n in sizes]
    design, taken = Design(DEPTHS, loads, 4, [load for load, _ in loads]), []
    while (index := design.cheapest()) is not None and len(taken) < 6:
        taken.append(sizes[index])
        design.take(index, (1e-3 * sizes[index], 2e-3 * sizes[index]), 0.0)
    assert taken == [24, 48, 96, 24, 24, 24]
