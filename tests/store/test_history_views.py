"""Views, macros and queries over the history of several runs, against values worked out by hand or in Python."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from dflop import records as r
from dflop.store.ingest import ingest
from tests.builders import make_rank_factor
from tests.store.asking import fill, named, rows, write


def run_input(
    run_id: str, job: str = "plan", key: str = "data", tables: tuple[str, ...] = ("t1",), seq: int = 1
) -> Any:
    return r.RunInput(run_id, job, 0, seq, "rev", key, "model", tables, 1000.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    """Three runs of one job: then a new layout and tables, then another data profile."""
    root = tmp_path_factory.mktemp("history")
    pp2, pp1 = make.plan("run1"), make.plan("run2")
    llm = dataclasses.replace(pp1.modules[1], parallel=r.ParallelSpec(1, 1, 2), layers_per_stage=(4,))
    pp1 = dataclasses.replace(pp1, plan_id="other", modules=(pp1.modules[0], llm), predicted_step_s=0.8, snapshot_seq=2)
    fill(root, make.run(run_id="run1", at_s=100.0), pp2, run_input("run1"), run_id="run1")
    write(root, make.run(run_id="run2", at_s=200.0), pp1, run_input("run2", tables=("t2",), seq=1), run_id="run2")
    third = dataclasses.replace(pp1, run_id="run3", plan_id="third")
    read = run_input("run3", key="more", tables=("t2",), seq=2)
    write(root, make.run(run_id="run3", at_s=300.0), third, read, run_id="run3")
    for run_id, step in (("run1/compare", 3), ("run1", 4)):
        event = r.RunEvent(run_id, "train", 0, step, "scheduler_dead", "exit code -9", 1000.0 + step)
        write(root, event, run_id=run_id)
    bad = r.QuarantinedSample("data", 3, "id3", "profile", "3.png", "truncated")
    write(root, bad, dataclasses.replace(bad, sample_index=4), run_id="run1")
    ingest(root)
    return root


def test_plan_history_says_what_changed(store: Path) -> None:
    first, second, third = named(store, "plan_history", name="demo")
    assert (first["changed"], first["previous_predicted_step_s"]) == (None, None)
    assert second["changed"] == "layout, cost tables"
    assert (second["previous_predicted_step_s"], second["predicted_step_s"]) == (1.0, 0.8)
    assert third["changed"] == "data profile"
    assert [row["run_id"] for row in (first, second, third)] == ["run1", "run2", "run3"]


def test_a_reused_data_profile_brings_its_quarantined_samples(store: Path) -> None:
    found = {row["run_id"]: row for row in rows(store, "from v_run_summary")}
    assert {run_id: row["num_quarantined_samples"] for run_id, row in found.items()} == {
        "run1": 2,
        "run2": 2,
        "run3": 0,
    }
    (row,) = named(store, "quarantine")
    assert (row["what"], row["num_skipped"], row["num_runs"], row["reason"]) == ("sample", 2, 1, "profile: truncated")
    assert (row["example"], row["example_reason"], row["example_path"]) == ("data#3", "profile: truncated", "3.png")


def test_events_of_a_run_come_in_order_with_those_of_its_comparison(store: Path) -> None:
    found = [(row["step"], row["kind"]) for row in named(store, "run_events", run_id="run1")]
    assert found == [(3, "scheduler_dead"), (4, "scheduler_dead")]
    assert named(store, "run_events", run_id="run2") == []
    counts = {row["run_id"]: row["num_events"] for row in rows(store, "from v_run_summary")}
    assert counts == {"run1": 2, "run2": 0, "run3": 0}


def test_what_a_run_read_leads_to_its_snapshot(store: Path) -> None:
    (row,) = named(store, "reproduce", run_id="run3")
    assert (row["job"], row["snapshot_seq"], row["data_profile_key"], row["table_ids"]) == ("plan", 2, "more", ["t2"])
    (published,) = rows(store, "select published_at as at from v_snapshot where snapshot_seq = 2")
    assert row["published_at"] == published["at"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    """Four ranks of one module over five steps; rank 2 is 30 % slow, shapes of step 3 are slow for everybody."""
    root = tmp_path_factory.mktemp("trained")
    (span, _) = make.observation(0).spans
    observations = []
    for step in range(5):
        for rank in range(4):
            pace = (1.3 if rank == 2 else 1.0) * (3.0 if step == 3 else 1.0)
            tokens = 50 * (rank + 1)
            mine = dataclasses.replace(
                span, num_tokens=tokens, predicted_forward_s=0.1 * (rank + 1), predicted_backward_s=0.0,
                forward_compute_s=0.1 * (rank + 1) * pace, backward_compute_s=0.0,
            )  # fmt: skip
            observations.append(
                make.observation(step, rank=rank, dp_rank=rank, step_s=2.0 + step, busy_s=1.0, spans=(mine,))
            )
    plans = [make.step_plan(step, sample_index=tuple(range(10))) for step in range(5)]
    return fill(root, *observations, *plans)


def test_a_slow_device_is_told_from_a_slow_shape(trained: Path) -> None:
    (row,) = named(trained, "stragglers", run_id="run")
    assert (row["rank"], row["num_steps"], row["num_peers"]) == (2, 5, 4)
    assert row["slowdown"] == pytest.approx(1.3)
    assert [x["slowdown"] for x in rows(trained, "from v_rank order by rank")] == pytest.approx([1, 1, 1.3, 1])


def test_prediction_error_by_size_falls_into_powers_of_two(trained: Path) -> None:
    found = named(trained, "prediction_error", run_id="run")
    assert [(row["min_tokens"], row["below_tokens"], row["num_spans"]) for row in found] == [
        (32, 64, 5), (64, 128, 5), (128, 256, 10),
    ]  # fmt: skip
    errors = [
        abs(1 / ((1.3 if rank == 2 else 1) * (3 if step == 3 else 1)) - 1) for rank in (2, 3) for step in range(5)
    ]
    assert found[2]["median_error_frac"] == pytest.approx(statistics.median(errors))
    measured = sum(0.1 * (rank + 1) * (1.3 if rank == 2 else 1) * 7 for rank in (2, 3))
    assert found[2]["predicted_to_measured"] == pytest.approx(0.7 * 5 / measured)


def test_throughput_over_time_counts_samples_and_tokens(trained: Path) -> None:
    found = named(trained, "throughput", run_id="run")
    assert [row["samples_per_s"] for row in found] == pytest.approx([10 / (2 + step) for step in range(5)])
    assert found[1]["llm_tokens_per_s"] == pytest.approx(100 / 3)
    assert found[4]["recent_llm_tokens_per_s"] == pytest.approx(5 * 100 / (2 + 3 + 4 + 5 + 6))
    assert found[0]["idle_frac"] == pytest.approx(0.5)


def test_the_quarters_of_a_run_show_that_it_gets_slower(trained: Path) -> None:
    found = named(trained, "slowdown", run_id="run")
    assert [row["median_step_s"] for row in found] == [2.5, 4.0, 5.0, 6.0]
    assert [(row["first_step"], row["last_step"]) for row in found] == [(0, 1), (2, 2), (3, 3), (4, 4)]


SPAN = r.MicrobatchSpan(0, 1, 50, 2500, 0.1, 0.2, 0.0, 0.2, 0.2, 0.3, 0.2, 0.3)


def slow_run(make, steps: int = 8, **changes: Any) -> list[Any]:
    """Rank 0 of each step had its core for all of forward and backward."""
    usual = {"spans": (SPAN,), "busy_s": 0.5, "step_s": 0.6, "data_wait_s": 0.0, "predicted_step_s": 0.6}
    return [make.observation(step, **{**usual, **changes}) for step in range(steps)]


TAKEN = dataclasses.replace(SPAN, forward_compute_s=0.08, backward_compute_s=0.12)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, "0.6 s, 1.00 times as predicted: no cause found among cores,"),
        (
            {"spans": (TAKEN,), "predicted_step_s": 0.24},
            "2.50 times as predicted: forward and backward took 2.50 times their compute time: other programs used",
        ),
        ({"data_wait_s": 0.2}, ": waits for input are 25 % of the time."),
        ({"busy_s": 0.3}, ": ranks are outside forward and backward for 50 % of the time."),
    ],
    ids=["healthy", "busy machine", "input", "idle"],
)
def test_why_a_run_was_slow_is_one_sentence(tmp_path: Path, make, changes: dict[str, Any], answer: str) -> None:
    fill(tmp_path, make.run(), *slow_run(make, **changes))
    (row,) = named(tmp_path, "why_slow", run_id="run")
    assert row["answer"].startswith("8 steps of ")
    assert answer in row["answer"]
    first = named(tmp_path, "wall_to_compute", run_id="run")[0]
    assert first["wall_s"] == changes.get("busy_s", 0.5)
    assert first["compute_s"] == pytest.approx(0.2 if "spans" in changes else 0.5)


def test_a_slow_host_and_its_rank_and_events_are_in_the_answer(tmp_path: Path, make) -> None:
    slow = dataclasses.replace(SPAN, forward_compute_s=0.4, backward_compute_s=0.6)
    ranks = [slow_run(make, rank=n, dp_rank=n, spans=(slow if n == 2 else SPAN,)) for n in range(3)]
    told = make_rank_factor(2, 2.0, run_id="run", host="node7")
    event = r.RunEvent("run", "train", 0, 1, "scheduler_late", "", 1000.0)
    fill(tmp_path, make.run(), *(seen for of_rank in ranks for seen in of_rank), told, event)
    (row,) = named(tmp_path, "why_slow", run_id="run")
    assert "rank 2 on node7 takes 2.00 times as long as its peers" in row["answer"]
    assert row["answer"].endswith("events: scheduler_late 1.")
    assert (row["slow_rank"], row["slow_host"], row["rank_slowdown"]) == (2, "node7", 2.0)
