"""What the end-to-end bench says of made-up seconds, and one whole small race."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dflop.jobs.rundir import RunDir
from dflop.train.activity import Activity
from tests.bench.endtoend import __main__ as bench
from tests.bench.endtoend import campaign, outcome, page, paired, rank, turns
from tests.bench.endtoend.arms import BLIND, OURS, TUNED, Profiled, Setup, make_contest
from tests.bench.endtoend.datasets import ANNOTATIONS, MEDIA, make_files
from tests.bench.endtoend.outcome import Case, idle_frac, same_losses
from tests.bench.endtoend.rank import wait_for_feed
from tests.bench.endtoend.summary import summaries
from tests.bench.endtoend.turns import group_cpu_s, turn_order
from tests.jobs import training
from tests.launch.helpers import until

SECONDS = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8)


@given(SECONDS)
def test_the_interval_is_that_of_a_t_test_of_the_seeds_logarithms(ratios: list[float]) -> None:
    found, logs = paired.over_seeds(ratios), np.log(ratios)
    assert found.mean == pytest.approx(stats.gmean(ratios))
    if np.ptp(logs) < 1e-6:
        assert (found.low, found.high) == pytest.approx((found.mean, found.mean), rel=1e-4)
        return
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(paired.CONFIDENCE)
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert found.is_conclusive == (stats.ttest_1samp(logs, 0.0).pvalue < 1 - paired.CONFIDENCE)


def test_steps_of_one_seed_are_one_observation() -> None:
    found = paired.over_seeds([paired.seed_ratio([2.0] * 50, [1.0] * 50)])
    assert (found.mean, found.low, found.high, found.num_seeds) == (pytest.approx(2.0), None, None, 1)
    assert not found.is_conclusive


@given(SECONDS, st.floats(0.5, 2.0))
def test_the_ratio_of_a_seed_is_paired_by_batch(seconds: list[float], factor: float) -> None:
    assert paired.seed_ratio([factor * s for s in seconds], seconds) == pytest.approx(factor)
    assert paired.seed_ratio(seconds, seconds[::-1]) == pytest.approx(1.0), "not a mean of ratios, which is above 1"


def test_batches_without_a_partner_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired.seed_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("blind_s", "ours_s", "steps"), [(3.0, 2.0, 60), (2.0, 2.0, None), (2.0, 3.0, None)])
def test_what_is_spent_before_is_saved_again_or_never(blind_s: float, ours_s: float, steps: int | None) -> None:
    assert paired.break_even_steps(60.0, blind_s, ours_s) == steps


@pytest.mark.parametrize("other", [1.001, math.nan])
def test_trainings_that_do_not_train_the_same_are_an_error(other: float) -> None:
    assert same_losses({OURS: [2.0, 1.0], TUNED: [2.0, 1.00001]}) == pytest.approx(1e-5)
    with pytest.raises(RuntimeError, match="did not train the same"):
        same_losses({OURS: [2.0, 1.0], TUNED: [2.0, 1.0], BLIND: [2.0, other]})


def test_idle_is_what_processes_could_have_had_and_did_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert idle_frac(busy_s=3.0, wall_s=2.0, num_processes=4) == pytest.approx(0.25), "two cores, however many share"
    assert idle_frac(busy_s=1.0, wall_s=2.0, num_processes=1) == pytest.approx(0.5)


def test_nobody_is_always_first() -> None:
    assert [turn_order("ABC", step) for step in (1, 2, 3)] == [list("ABC"), list("CBA"), list("ABC")]


def test_the_seconds_of_a_group_are_those_of_all_in_it() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    first = subprocess.Popen([sys.executable, "-c", burn], process_group=0, **pipes)
    second = subprocess.Popen([sys.executable, "-c", burn], process_group=first.pid, **pipes)
    with first, second:
        for process in (first, second):
            assert process.stdout.readline() == b"\n"
        assert group_cpu_s({first.pid}) > 0.5, "the kernel counts in hundredths, rounded down"
        assert group_cpu_s({-1}) == 0.0
        for process in (first, second):
            process.communicate(b"\n")


def test_a_rank_waits_for_the_data_of_the_step_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, did = Activity(), []
    monkeypatch.setattr(time, "sleep", lambda _: did.append(feed.waits("the step before")))
    feed.step = 4
    feed.works("its data")
    wait_for_feed(feed, 4)
    assert len(did) == 1
    monkeypatch.setattr(rank, "MAX_POLLS", 2)
    with pytest.raises(RuntimeError, match="step 6 is not prepared: step 5, the step before"):
        wait_for_feed(feed, 5)


def _seed(number: int, arms: dict[str, float], *, setup_s: float = 30.0) -> dict[str, Any]:
    """Two steps of every arm, the second twice as long; simulated is half of measured."""

    def arm(step_s: float) -> dict[str, Any]:
        return {
            "plan": {"layout": "inline dp2", "num_microbatches": 4, "plan_id": "p", "num_processes": 2},
            "step_s": [step_s, 2 * step_s], "cpu_s": [1.0, 2.0], "simulated_s": [step_s / 2, step_s],
            "idle_frac": [0.1, 0.3], "num_quick_plans": 0, "peak_bytes": [2**30, 2**30],
        }  # fmt: skip

    return {
        "data": "demo", "num_processes": 4, "seed": number, "num_llm_tokens": [300, 600],
        "setup": {"data_profile_s": 1.0, "model_profile_s": setup_s - 2.0, "plan_s": 1.0},
        "largest_loss_error": 0.0, "losses": [], "arms": {name: arm(s) for name, s in arms.items()},
    }  # fmt: skip


def test_seeds_are_summed_up_per_case_and_arm() -> None:
    seeds = [_seed(0, {OURS: 1.0, TUNED: 1.2, BLIND: 3.0}), _seed(1, {OURS: 1.0, TUNED: 1.3})]
    tuned, blind = summaries(seeds)
    assert (tuned.against, tuned.of_seed) == (TUNED, pytest.approx((1.2, 1.3)))
    assert (tuned.measured.mean, tuned.simulated) == (pytest.approx(math.sqrt(1.2 * 1.3)),) * 2
    assert (tuned.blind.step_s, tuned.ours.step_s) == pytest.approx((1.5 * 1.25, 1.5))
    assert tuned.ours.tokens_per_s == pytest.approx(300)
    assert (tuned.ours.idle_frac, tuned.ours.peak_bytes) == (pytest.approx(0.2), 2**31)
    assert (tuned.setup_s, tuned.break_even) == (pytest.approx(30.0), 80)
    assert (blind.measured.num_seeds, blind.measured.mean) == (1, pytest.approx(3.0)), "where there is such a plan"


def test_tables_say_what_is_worse_and_what_is_single() -> None:
    content = {"machine": {"num_cores": 2}, "seeds": [_seed(0, {OURS: 1.0, TUNED: 0.9})]}
    found = page.tables(content)
    assert "| demo | 4 on 2 cores | one layout, tuned | 0.90x (single seed) | 0.90x |" in found["endtoend"]
    assert "| never |" in found["endtoend"]
    assert found["endtoend-arms"].count("\n") == 3, "a header and both arms"
    two = page.tables({**content, "seeds": [_seed(n, {OURS: 1.0, TUNED: 1.2 + n / 10}) for n in range(2)]})
    assert "1.25x (0.75 to 2.08)" in two["endtoend"]


def test_rows_of_a_media_folder_are_repeated_under_ids_of_their_own(tmp_path: Path) -> None:
    media = tmp_path / "given"
    media.mkdir()
    (media / ANNOTATIONS).write_text('{"id": "a", "image": "x.png"}\n{"id": "b"}\n')
    files = make_files(MEDIA, tmp_path, media, num_rows=5)
    rows = [json.loads(line) for line in files.annotations.read_text().splitlines()]
    assert [r["id"] for r in rows] == ["a-0", "b-1", "a-2", "b-3", "a-4"]
    assert (rows[4]["image"], files.media_root, files.tokenizer.is_file()) == ("x.png", media, True)
    with pytest.raises(SystemExit, match="no-such"):
        make_files(MEDIA, tmp_path, tmp_path / "no-such", num_rows=5)


def test_a_file_is_gone_on_with_if_it_is_of_the_same_measurement(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    content = campaign.begun(path, campaign.SMALL)
    content["seeds"].append(_seed(3, {OURS: 1.0, TUNED: 1.2}))
    campaign.keep(path, content)
    again = campaign.begun(path, campaign.SMALL)
    assert campaign.has(again["seeds"][0], Case("demo", 4, 3))
    assert not campaign.has(again["seeds"][0], Case("demo", 4, 2))
    assert again["summary"][0]["measured"]["mean"] == pytest.approx(1.2)
    with pytest.raises(SystemExit, match="remove it first"):
        campaign.begun(path, campaign.FULL)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases that were measured, in order; nothing is trained."""
    found: list[Case] = []

    def measure(case: Case, _profiled: object, folder: Path, num_counted: int, _say: object) -> dict[str, Any]:
        folder.mkdir()
        found.append(case)
        arms = {OURS: 1.0, TUNED: 1.1 + case.seed / 10} | ({BLIND: 1.3} if case.num_processes > 2 else {})
        return _seed(case.seed, arms) | dataclasses.asdict(case)

    monkeypatch.setattr(campaign, "warm", lambda: None)
    monkeypatch.setattr(campaign, "make_files", lambda *_: None)
    monkeypatch.setattr(campaign, "profiled_run", lambda folder, *_: folder)
    monkeypatch.setattr(campaign, "measure", measure)
    return found


def test_with_one_seed_both_data_and_both_numbers_of_processes_are_met_once() -> None:
    assert campaign.wanted(campaign.SMALL, True) == [Case("demo", 4, 0), Case("media", 2, 0)]
    assert campaign.wanted(campaign.SMALL, False) == [Case("demo", 2, 0), Case("demo", 4, 0)]
    assert len(campaign.wanted(campaign.FULL, True)) == 20


def test_what_a_file_has_already_is_not_measured_again(
    played: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["endtoend", "--media", str(tmp_path), "--json", str(path)])
    monkeypatch.setattr(campaign, "SMALL", campaign.Size(2, 4, 16, 8.0))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # the bench would choose one for this process
    bench.main()
    assert played == [Case(data, n, seed) for data in ("demo", "media") for n in (2, 4) for seed in (0, 1)]
    told = capsys.readouterr().out
    assert told.count("| 1.15x (") == 4, "against the tuned plan"
    assert told.count("| planned for mean samples | 1.30x (") == 2, "where there are processes enough for it"
    content = json.loads(path.read_text())
    content["seeds"] = content["seeds"][:-1]
    path.write_text(json.dumps(content))
    bench.main()
    assert played[8:] == [Case("media", 4, 1)]
    assert capsys.readouterr().out == told


def _states(run: RunDir) -> set[str]:
    """What the kernel says of the ranks of a run: `T` is stopped."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(run.path) in (folder / "cmdline").read_text().split("\0"):
                found.add((folder / "stat").read_text().rpartition(")")[2].split()[0])
    return found


@pytest.mark.slow
def test_two_trainings_take_turns_and_train_the_same(tmp_path: Path) -> None:
    settings = ("cluster.num_processes_per_node=2", "cluster.memory_per_process_gib=3", "train.timeout_s=600")
    planned = training.planned_run(tmp_path / "planned", *settings, num_kept=24)
    profiled = Profiled(planned, "model", Setup(1.0, 2.0, 0.0))
    num_counted, case = 2, Case("demo", 2, 1)
    num_steps = outcome.total_steps(num_counted)
    contest = make_contest(profiled, tmp_path / "seed", case.seed, num_steps, lambda line: None)
    assert [arm.name for arm in contest.arms] == [OURS, TUNED, BLIND]
    raced = dataclasses.replace(contest, arms=contest.arms[:2])
    seen: list[str] = []

    def look(line: str) -> None:
        seen.append(line)
        stopped = [{"T"}] * len(raced.arms)  # on a busy machine a process stops only when its turn on a core comes
        until(lambda: [_states(a.run) for a in raced.arms] == stopped, what="scheduler and all to be stopped")

    taken = turns.take_turns(raced.arms, num_steps, look)
    assert len(seen) == num_steps - 2
    found = outcome.figures(case, raced, taken, num_counted)
    assert 0.0 <= found["largest_loss_error"] <= outcome.MAX_LOSS_ERROR
    assert len(found["losses"]) == num_steps
    (summary,) = summaries([found])
    assert summary.against == TUNED
    assert (summary.num_steps, summary.measured.num_seeds) == (num_counted, 1)
    for arm in found["arms"].values():
        assert len(arm["step_s"]) == num_counted
        assert min(arm["step_s"]) > 0
        assert min(arm["cpu_s"]) > 0
        assert all(0 < frac < 1 for frac in arm["idle_frac"])
        assert len(arm["peak_bytes"]) == 2
