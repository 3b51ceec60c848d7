"""When which group is timed: a group's repeats in two sweeps, so that a slow spell of the machine is nobody's shape."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from dflop.profile import probe as probe_module
from dflop.profile.probe import ModuleProbe
from dflop.profile.run import MIN_GROUPS
from tests.profile.test_probe import SETTINGS, profile
from tests.train.synthetic import make_shapes

NUM_GROUPS, DEPTHS = MIN_GROUPS, (1, 2)


class Watch:
    """Notes what is prepared and timed; the n-th timing takes n seconds forward and 2 n backward."""

    def __init__(self, monkeypatch):
        self.started, self.timed, self.count = [], [], 0
        start, repeat = ModuleProbe._start, ModuleProbe._repeat

        def noted_start(probe, group):
            self.started.append((probe._num_layers, group))
            return start(probe, group)

        def noted_repeat(probe, forward, run):
            repeat(probe, forward, run)
            self.timed.append((probe._num_layers, id(run)))

        def count(*args, **kwargs):
            self.count += 1
            return float(self.count), 2.0 * self.count

        monkeypatch.setattr(ModuleProbe, "_start", noted_start)
        monkeypatch.setattr(ModuleProbe, "_repeat", noted_repeat)
        monkeypatch.setattr(probe_module, "time_phases", count)
        monkeypatch.setattr(probe_module, "optimizer_step_s", lambda *_: 0.0)


def probe_llm(num_repeats, **changes):
    """Rows of a text-only profile, in the order drawn."""
    settings = dataclasses.replace(SETTINGS, num_repeats=num_repeats)
    shapes = [s for s in make_shapes(60, seed=1) if not s.items]
    options = {"num_probes": NUM_GROUPS, "target_frac": None, "settings": settings}
    return profile(shapes, **options | changes)[0]


@pytest.mark.parametrize(("num_repeats", "num_first"), [(2, 1), (3, 2), (5, 3)])
def test_repeats_are_spread_over_two_sweeps(monkeypatch, num_repeats, num_first):
    watch = Watch(monkeypatch)
    rows = probe_llm(num_repeats)
    assert [r.num_repeats for r in rows] == [num_repeats] * len(rows)
    groups = [watch.started[2 * i][1] for i in range(2 * NUM_GROUPS)]
    assert groups[:NUM_GROUPS] == groups[NUM_GROUPS:], "the second sweep goes over the same groups"
    visits = [num_first] * NUM_GROUPS + [num_repeats - num_first] * NUM_GROUPS
    assert [n for n, _ in watch.timed] == [n for times in visits for n in DEPTHS * times], "depths take turns"
    runs = [(n, run) for i in range(NUM_GROUPS) for n, run in watch.timed[2 * num_first * i :][:2]]
    for row, key in zip(rows, runs, strict=True):
        seconds = [i for i, timed in enumerate(watch.timed, start=1) if timed == key]
        assert len(seconds) == num_repeats
        assert (row.forward_s, row.backward_s) == (statistics.median(seconds), 2 * statistics.median(seconds))
        assert row.forward_spread_s > num_first / 2, "the spread is that of both sweeps"


def test_a_spent_budget_leaves_out_the_second_sweep(monkeypatch):
    watch = Watch(monkeypatch)
    rows = probe_llm(5, budget_s=0.0)
    assert [r.num_repeats for r in rows] == [3] * len(DEPTHS) * NUM_GROUPS
    assert len(watch.started) == len(DEPTHS) * NUM_GROUPS


def test_one_repeat_is_one_sweep(monkeypatch):
    watch = Watch(monkeypatch)
    assert {r.num_repeats for r in probe_llm(1)} == {1}
    assert len(watch.started) == len(DEPTHS) * NUM_GROUPS


def test_what_fits_no_more_at_the_second_visit_keeps_its_rows(monkeypatch):
    watch = Watch(monkeypatch)
    noted_start = ModuleProbe._start

    def start(probe, group):
        if len(watch.started) >= len(DEPTHS) * NUM_GROUPS:
            raise MemoryError
        return noted_start(probe, group)

    monkeypatch.setattr(ModuleProbe, "_start", start)
    rows = probe_llm(3)
    assert {(r.status, r.num_repeats) for r in rows} == {("ok", 2)}
    assert len(rows) == len(DEPTHS) * NUM_GROUPS
