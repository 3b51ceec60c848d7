"""Which group is timed when: a group's repeats in two sweeps, so that a slow spell of the machine is nobody's shape."""

from __future__ import annotations

import dataclasses
import statistics
from types import SimpleNamespace

import pytest

from dflop.profile import probe as probe_module
from dflop.profile.probe import GroupVisits, ModuleProbe
from dflop.profile.sweeps import MIN_GROUPS, next_group, sweep
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
    """Rows of a text-only profile."""
    settings = dataclasses.replace(SETTINGS, num_repeats=num_repeats)
    shapes = [s for s in make_shapes(60, seed=1) if not s.items]
    options = {"num_probes": NUM_GROUPS, "settings": settings}
    return profile(shapes, **options | changes)[0]


@pytest.mark.parametrize(("num_repeats", "num_first"), [(2, 1), (5, 3)])
def test_repeats_are_spread_over_two_sweeps(monkeypatch, num_repeats, num_first):
    watch = Watch(monkeypatch)
    rows = probe_llm(num_repeats)
    assert [r.num_repeats for r in rows] == [num_repeats] * len(rows)
    largest, *groups = [group for _, group in watch.started[:: len(DEPTHS)]]
    assert largest.load.num_tokens == max(group.load.num_tokens for group in groups), "warms up"
    assert groups[:NUM_GROUPS] == groups[NUM_GROUPS:], "the second sweep goes over the same groups"
    visits = [num_first] * NUM_GROUPS + [num_repeats - num_first] * NUM_GROUPS
    assert [n for n, _ in watch.timed] == [n for times in visits for n in DEPTHS * times], "depths take turns"
    runs = [(n, run) for i in range(NUM_GROUPS) for n, run in watch.timed[2 * num_first * i :][:2]]
    for row, key in zip(rows, runs, strict=True):
        seconds = [i for i, timed in enumerate(watch.timed, start=1) if timed == key]
        assert len(seconds) == num_repeats
        assert (row.forward_s, row.backward_s) == (statistics.median(seconds), 2 * statistics.median(seconds))
        assert row.forward_spread_s > num_first / 2, "the spread is that of both sweeps"


@pytest.mark.parametrize(("num_repeats", "num_done", "budget_s"), [(5, 3, 0.0), (1, 1, 1e9)])
def test_a_spent_budget_leaves_out_the_second_sweep_and_one_repeat_has_none(
    monkeypatch, num_repeats, num_done, budget_s
):
    watch = Watch(monkeypatch)
    rows = probe_llm(num_repeats, budget_s=budget_s)
    assert [r.num_repeats for r in rows] == [num_done] * len(DEPTHS) * NUM_GROUPS
    assert len(watch.started) == len(DEPTHS) * (1 + NUM_GROUPS)


def test_what_fits_no_more_at_the_second_visit_keeps_its_rows(monkeypatch):
    watch = Watch(monkeypatch)
    noted_start = ModuleProbe._start

    def start(probe, group):
        if len(watch.started) >= len(DEPTHS) * (1 + NUM_GROUPS):
            raise MemoryError
        return noted_start(probe, group)

    monkeypatch.setattr(ModuleProbe, "_start", start)
    rows = probe_llm(3)
    assert {(r.status, r.num_repeats) for r in rows} == {("ok", 2)}
    assert len(rows) == len(DEPTHS) * NUM_GROUPS


FIXED_S, PER_TOKEN_S = 0.01, 1e-3


class Clock:
    """Time that only probes take: a fixed part and so much per token and layer, of every run, timed or not."""

    def __init__(self, monkeypatch):
        self.now = self.warm_up_s = 0.0
        self.loads = {}

        def run_s(probe, group):
            return FIXED_S + PER_TOKEN_S * probe._num_layers * group.load.num_tokens

        def start(probe, group):
            self.loads[probe] = run_s(probe, group)
            self.now += self.loads[probe]
            return None, probe_module._Run(True, 0, 0, [])

        def repeat(probe, forward, run):
            self.now += self.loads[probe]
            run.timings.append((self.loads[probe] / 3, self.loads[probe] * 2 / 3))

        visit = GroupVisits.visit

        def noted_visit(visits, num_repeats):
            before = self.now
            visit(visits, num_repeats)
            self.warm_up_s += 0.0 if num_repeats else self.now - before

        monkeypatch.setattr(GroupVisits, "visit", noted_visit)
        monkeypatch.setattr(ModuleProbe, "_start", start)
        monkeypatch.setattr(ModuleProbe, "_repeat", repeat)
        monkeypatch.setattr(probe_module, "optimizer_step_s", lambda *_: 0.0)
        monkeypatch.setattr("dflop.profile.profiler.time.perf_counter", lambda: self.now)

    def spent_s(self):
        """Since it was last asked, without warming up, which no budget counts."""
        spent_s, self.now, self.warm_up_s = self.now - self.warm_up_s, 0.0, 0.0
        return spent_s


def test_large_groups_do_not_overrun_the_budget(monkeypatch):
    clock = Clock(monkeypatch)
    options = {"num_probes": 18, "max_samples": 24}
    probe_llm(3, **options)
    all_of_it_s = clock.spent_s()
    budget_s = all_of_it_s / 10
    rows = probe_llm(3, **options, budget_s=budget_s)
    assert len(rows) >= len(DEPTHS) * MIN_GROUPS
    assert 0.5 * budget_s <= clock.spent_s() <= 1.05 * budget_s, "what there is to spend is spent"
    assert len({r.num_tokens for r in rows}) >= 4


def test_where_small_groups_take_what_launching_does_the_largest_is_still_affordable():
    sizes, visited = [10, 8000, 20, 30, 40, 50, 60, 500], []

    def visit(index, num_timed):
        if num_timed:
            visited.append(sizes[index])
        return (1 + num_timed) * max(1.0, sizes[index] / 1000)

    sweep(sizes, 150.0, 1, visit)
    assert visited == sizes, "800 times the tokens take 8 times as long, which the warm-up showed"


def test_of_the_cheapest_groups_those_of_a_new_size_come_first():
    sizes, done = [24] * 8 + [48, 96], []
    while (index := next_group([1e-3 * n for n in sizes], sizes, done, -1.0)) is not None:
        done.append(sizes.pop(index))
    assert done == [24, 48, 96, 24, 24, 24]


def test_a_module_probed_alone_has_its_share_of_the_budget(monkeypatch):
    clock = Clock(monkeypatch)
    shapes = make_shapes(60, seed=1, kinds=("image",))
    options = {"num_probes": 18, "max_samples": 12, "only": "llm"}
    profile(shapes, **options)
    all_of_it_s = clock.spent_s()
    profile(shapes, **options, budget_s=all_of_it_s)
    assert clock.spent_s() <= 0.55 * all_of_it_s, "the other half is the encoder's, whose job may run at the same time"


def test_modules_that_so_many_ranks_cannot_share_are_left_out():
    rows, lines = profile(make_shapes(30, seed=1, kinds=("image",)), group=SimpleNamespace(size=lambda: 3))
    assert rows == []
    assert lines == [f"{m}: 3 tensor-parallel ranks cannot split it, skipped" for m in ("vision", "llm")]
