"""Whole jobs with a scheduler that dies or is silent, or with files that went bad: they train what is left."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from dflop.data.demo import make_demo_dataset
from dflop.records import GradNorm, QuarantinedSample, RunEvent, SourceLoss, StepObservation, StepPlan
from dflop.run.batches import QUICK, GlobalBatches
from dflop.run.directory import RunDir
from tests.jobs.training import BATCH_SIZE, fresh, losses_of, planned_run, run_ranks, set_config
from tests.store.spooled import read_spool

NUM_STEPS = 16
STEPS = list(range(NUM_STEPS))

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(300)]


@pytest.fixture
def train(planned, tmp_path) -> Callable[..., RunDir]:
    """Trains a copy of the run, undisturbed or with an accident, to its end."""

    def run(
        *accident: str,
        num_steps: int = NUM_STEPS,
        num_workers: int = 0,
        report_to: str = "",
        more: tuple[str, ...] = (),
    ) -> RunDir:
        copy = fresh(planned, tmp_path / "-".join(("run", *accident, str(num_workers))))
        set_config(copy, f"train.num_steps={num_steps}", f"train.num_workers={num_workers}", "train.prefetch_steps=3",
                   f"train.report_to=[{report_to}]", *more)  # fmt: skip
        entry = ["tests.jobs.accidents", *accident, "0", str(copy.path)]
        ended = run_ranks(copy, *(entry if accident else ["dflop.jobs.train", str(copy.path), "train"]))
        assert ended.codes == (0, 0), "\n".join(ended.stderr)
        assert "attention: sdpa" in ended.stderr[0]
        assert ended.stderr[0].count("gets no more curves of this job, training continues: ") == bool(report_to)
        for _, kind, detail in events(copy):
            assert f"{kind.replace('_', ' ')}: {detail}" in ended.stderr[0]
        return copy

    return run


def events(run: RunDir) -> list[tuple[int, str, str]]:
    found = sorted(read_spool(run.config().store, RunEvent), key=lambda e: e.observed_at_s)
    scheduler_says = ("scheduler_behind", "machine_busy")  # in its own log
    return [(e.step, e.kind, e.detail) for e in found if e.kind not in scheduler_says]


def happened(run: RunDir, *kinds: str) -> list[tuple[int, str]]:
    return [(step, kind.removeprefix("scheduler_")) for step, kind, _ in events(run) if kind.endswith(kinds)]


def policies(run: RunDir) -> list[str]:
    """What ran, step by step; every step is in the store once, whoever planned it and whatever became of them."""
    plans = sorted(read_spool(run.config().store, StepPlan), key=lambda p: p.step)
    assert [p.step for p in plans] == STEPS
    seen = {(o.step, o.rank): o for o in read_spool(run.config().store, StepObservation)}
    assert sorted(seen) == [(step, rank) for step in STEPS for rank in (0, 1)]
    assert [seen[step, 0].policy for step in STEPS] == [p.policy for p in plans]
    return [p.policy for p in plans]


def test_a_killed_scheduler_changes_no_loss_and_comes_back(train):
    undisturbed, killed = train(), train("scheduler-killed")
    assert losses_of(killed) == pytest.approx(losses_of(undisturbed), rel=1e-5)
    assert sorted(losses_of(killed)) == STEPS
    assert happened(undisturbed, "dead", "restarted", "given_up") == []
    assert happened(killed, "dead", "restarted", "given_up") == [
        (3, "dead"), (4, "restarted"), (5, "dead"), (9, "restarted"),
    ]  # fmt: skip
    ran = policies(killed)
    assert set(ran[6:11]) == {QUICK}, "nobody else was there to plan"
    assert QUICK not in ran[11:14], "its third start was waited for"


def test_a_scheduler_that_says_nothing_holds_nobody_up(train):
    run = train("scheduler-mute")
    assert set(policies(run)) == {QUICK}
    assert happened(run, "") == [(step, "late") for step in STEPS]


@pytest.fixture
def broken(planned) -> Iterator[dict[str, str]]:
    """Reasons by path of files that went bad after the profile; later tests have them back."""
    root = planned.config().dataset.media_root
    deleted, emptied = sorted({s.items[0].path for s in planned.shapes() if s.items})[:2]
    contents = {path: (root / path).read_bytes() for path in (deleted, emptied)}
    (root / deleted).unlink()
    (root / emptied).write_bytes(b"")
    yield {deleted: "file not found", emptied: "empty file (0 bytes)"}
    for path, content in contents.items():
        (root / path).write_bytes(content)


def left_out(run: RunDir) -> dict[tuple[int, int], tuple[str, str]]:
    found = [q for q in read_spool(run.config().store, QuarantinedSample) if q.phase == "train"]
    return {(q.step, q.sample_index): (q.path, q.reason) for q in found}


def test_a_job_trains_the_same_with_decode_workers_and_leaves_out_the_same_samples(train, broken):
    with_workers, plain = train(num_steps=5, num_workers=2), train(num_steps=5)
    assert sorted(losses_of(plain)) == list(range(5))
    assert losses_of(with_workers) == pytest.approx(losses_of(plain), rel=1e-4)
    assert left_out(with_workers) == left_out(plain)
    assert set(left_out(plain).values()) == set(broken.items())


def test_a_job_validates_on_samples_that_it_never_trains_on(train):
    run = train(num_steps=5, more=("validation.num_samples=10", "validation.every_steps=2"))
    rows = read_spool(run.config().store, SourceLoss)
    squares: dict[int, float] = {}
    for norm in read_spool(run.config().store, GradNorm):
        squares[norm.step] = squares.get(norm.step, 0.0) + norm.grad_norm**2
    whole = {seen.step: seen.grad_norm**2 for seen in read_spool(run.config().store, StepObservation)}
    assert squares == pytest.approx(whole)
    assert sorted(row.step for row in rows) == [1, 3, 4]
    held_out = {s.sample_index for batch in GlobalBatches(run.config(), run.shapes()).validated for s in batch}
    assert {row.num_samples for row in rows} == {len(held_out)}
    trained = {index for p in read_spool(run.config().store, StepPlan) for index in p.sample_index}
    assert len(trained) == 5 * BATCH_SIZE - 2, "an epoch of 38"
    assert not trained & held_out
    first, *_, last = sorted(rows, key=lambda row: row.step)
    assert last.loss < first.loss < losses_of(run)[0]


def test_a_mixture_has_a_loss_per_entry_and_one_that_is_held_out_whole(tmp_path):
    make_demo_dataset(tmp_path / "data", 96)
    rows = (tmp_path / "data/annotations.jsonl").read_text().splitlines(keepends=True)
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / f"{name}.jsonl").write_text("".join(rows[number::3]))
    entries = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b", "c")]
    (tmp_path / "mixture.yaml").write_text(json.dumps({"datasets": entries}))
    run = planned_run(
        tmp_path, f"dataset.annotations={tmp_path}/mixture.yaml", "validation.sources=[b.jsonl]", "train.num_steps=3"
    )
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    assert ended.codes == (0, 0), "\n".join(ended.stderr)
    found = read_spool(run.config().store, SourceLoss)
    assert {(row.split, row.source) for row in found} == {
        ("train", "a.jsonl"), ("train", "c.jsonl"), ("validation", "b.jsonl")
    }  # fmt: skip
    for step, loss in losses_of(run).items():
        of_step = [row for row in found if row.split == "train" and row.step == step]
        num_tokens = sum(row.num_tokens for row in of_step)
        assert loss == pytest.approx(sum(row.loss * row.num_tokens for row in of_step) / num_tokens, rel=1e-5)


def test_a_job_that_gets_no_better_ends_early_and_its_run_is_over(train):
    run = train(
        num_steps=9, more=("validation={num_samples: 8, every_steps: 1, patience: 2}", "train.learning_rate=1e-30")
    )
    assert happened(run, "stopped_early") == [(2, "stopped_early")]
    assert sorted(losses_of(run)) == [0, 1, 2]
    assert run.next_step() == 9


def test_a_job_that_overfits_learns_its_few_samples(train):
    run = train(num_steps=10, more=("train.overfit_samples=4", "train.learning_rate=0.01"))
    assert len({index for p in read_spool(run.config().store, StepPlan) for index in p.sample_index}) == 4
    losses = losses_of(run)
    assert losses[9] < 0.8 * losses[0]


def test_a_tracker_whose_server_never_answers_does_not_keep_a_job_from_ending(train, monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for variable, value in (("WANDB_BASE_URL", url), ("WANDB_MODE", "online"), ("WANDB_API_KEY", "0" * 40)):
            monkeypatch.setenv(variable, value)
        assert sorted(losses_of(train(num_steps=5, report_to="wandb"))) == list(range(5))
