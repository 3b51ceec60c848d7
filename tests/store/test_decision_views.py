"""What a run learnt and decided, asked in SQL, against values worked out by hand."""

from pathlib import Path

import pytest

from dflop.records import JobRecord, RunRecord
from tests.builders import make_corrections, make_rank_factor
from tests.store.asking import fill, named, rows, write
from tests.story import corrected, story


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("told")
    write(root, *story())
    return fill(root, *story("other"), run_id="other")


def test_history_is_everything_in_order(told: Path) -> None:
    found = named(told, "history", run_id="run")
    assert [(row["elapsed_s"], row["kind"], row["subject"], row["verdict"]) for row in found] == [
        (0.0, "run", "demo", "running"), (1.0, "plan", "plan0", "chosen"), (12.0, "job", "train", "running"),
        (20.0, "correction", "llm", "done"), (30.0, "correction", "llm", "done"), (30.0, "rescale", "llm", "done"),
        (35.0, "scheduler_late", "train", "survived"), (40.0, "slow_rank", "rank 2", "noticed"),
        (50.0, "drift_shapes", "vision", "noticed"), (55.0, "replan", "plan1", "stay"),
        (70.0, "replan", "plan1", "done"), (72.0, "job", "train", "interrupted"), (73.0, "plan", "plan1", "chosen"),
        (75.0, "job", "train", "running"), (100.0, "run", "demo", "done"),
    ]  # fmt: skip
    done = next(row for row in found if row["verdict"] == "done" and row["kind"] == "replan")
    assert (done["step"], done["attempt"], done["gain_s"], done["cost_s"]) == (40, 0, 54.0, 20.0)
    assert [row["step"] for row in found if row["kind"] == "plan"] == [None, 40]
    assert [row["attempt"] for row in found if row["kind"] == "job"] == [0, 0, 1]
    assert named(told, "history", run_id="nobody") == []


def test_training_jobs_are_told_by_the_names_that_drivers_give_them(tmp_path: Path) -> None:
    drivers_names = (("run-data-0", 1.0), ("run-train", 2.0), ("run-train-links", 3.0))
    jobs = (JobRecord("run", name, "k", "slurm", "7", "running", "", "/", 4, 0, at_s) for name, at_s in drivers_names)
    fill(tmp_path, RunRecord("run", "demo", "key", "running", "cpu", "torch", "abc", "/runs/run", 0.5), *jobs)
    shown = [row for row in named(tmp_path, "history", run_id="run") if row["kind"] == "job"]
    assert [(row["subject"], row["elapsed_s"]) for row in shown] == [("train", 1.5)]


def test_corrections_are_told_by_bucket(tmp_path: Path) -> None:
    write(tmp_path, *corrected("run", (1.0, 1.2, 2.0), 1000.0, 0, level=1.1, sd_frac=0.05))
    write(tmp_path, *corrected("run", (1.0, 1.5, 2.5), 1001.0, 1, level=1.2, is_in_force=False))
    fill(tmp_path, *make_corrections("llm", (1.3, 3.0), (100,), observed_at_s=1002.0))
    found = named(tmp_path, "corrections", module="llm")
    assert [(row["min_tokens"], row["previous_factor"], row["factor"]) for row in found] == [
        (0, 1.0, 1.3), (100, None, 3.0),  # other bounds: another bucket
        (0, 1.0, 1.0), (100, 1.2, 1.5), (900, 2.0, 2.5),
        (0, None, 1.0), (100, None, 1.2), (900, None, 2.0),
    ]  # fmt: skip
    assert found[4]["change_frac"] == pytest.approx(0.25)
    assert [row["max_tokens"] for row in found[2:5]] == [100, 900, None], "a bucket without an end has none"
    assert [(row["level"], row["is_in_force"], row["sd_frac"]) for row in (found[4], found[5])] == [
        (1.2, False, 0.02), (1.1, True, 0.05),
    ]  # fmt: skip
    assert rows(tmp_path, "select num_corrections as n from v_run_summary") == []  # no run record


def test_slow_ranks_have_their_newest_factor_per_attempt(tmp_path: Path) -> None:
    fill(
        tmp_path,
        make_rank_factor(0, 1.5, observed_at_s=10.0),
        make_rank_factor(0, 1.02, observed_at_s=20.0),
        make_rank_factor(1, 1.2, sd_frac=0.15),
        make_rank_factor(2, 1.2, sd_frac=0.05),
        make_rank_factor(0, 1.4, attempt=1, is_in_force=False),
    )
    found = named(tmp_path, "slow_ranks", run_id="run")
    assert [(row["attempt"], row["rank"], row["factor"], row["is_slow"]) for row in found] == [
        (1, 0, 1.4, True), (0, 1, 1.2, False), (0, 2, 1.2, True), (0, 0, 1.02, False),
    ]  # fmt: skip
    assert [row["host"] for row in found] == ["host0", "host0", "host1", "host0"]


def test_decisions_name_the_plans_in_words(told: Path) -> None:
    _rescale, _slow, drift, _stay, done = named(told, "decisions", run_id="run")
    assert (drift["measured"], drift["expected"], drift["gain_s"], drift["new_layout_text"]) == (1.9, None, None, None)
    assert done["layout_text"] == "vision tp1 pp1 dp2 | llm tp1 pp2 dp1"
    assert done["new_layout_text"] == "vision tp1 pp1 dp1 | llm tp1 pp1 dp3"
    assert (done["gain_s"], done["cost_s"], done["num_steps_left"]) == (54.0, 20.0, 60)
    assert named(told, "decisions", run_id="nobody") == []
    (row,) = rows(told, "select num_corrections, plan_layout from v_run_summary where run_id = 'run'")
    assert row == {"num_corrections": 3, "plan_layout": done["new_layout_text"]}, "sets, and the plan that ran last"
