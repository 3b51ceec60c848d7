"""A whole job with decode workers and files that went bad after the profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflop.records import QuarantinedSample
from dflop.store.spool import read_spool
from tests.jobs.training import fresh, losses_of, planned_run, run_ranks

NUM_STEPS = 5

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    run = planned_run(
        tmp_path_factory.mktemp("job"), f"train.num_steps={NUM_STEPS}", "train.prefetch_steps=3", "train.num_workers=7"
    )
    root = run.config().dataset.media_root
    deleted, emptied = sorted({s.items[0].path for s in run.shapes() if s.items})[:2]
    (root / deleted).unlink()
    (root / emptied).write_bytes(b"")
    return run, {deleted: "file not found", emptied: "empty file (0 bytes)"}


def train(planned, folder: Path, num_workers: int):
    """(losses by step, quarantined samples) of a job with so many workers."""
    run = fresh(planned, folder)
    text = run.config_file.read_text()
    assert text.count("num_workers: 7") == 1
    run.config_file.write_text(text.replace("num_workers: 7", f"num_workers: {num_workers}"))
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    assert ended.codes == (0, 0), "\n".join(ended.stderr)
    assert "attention: sdpa" in ended.stderr[0]
    found = [q for q in read_spool(run.config().store, QuarantinedSample) if q.phase == "train"]
    return losses_of(run), {(q.step, q.sample_index): (q.path, q.reason) for q in found}


def test_a_job_trains_the_same_with_workers_and_leaves_out_the_same_samples(planned, tmp_path):
    run, broken = planned
    losses, left_out = train(run, tmp_path / "workers", 2)
    expected, expected_left_out = train(run, tmp_path / "plain", 0)
    assert sorted(losses) == list(range(NUM_STEPS))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert left_out == expected_left_out
    assert set(left_out.values()) == set(broken.items())
