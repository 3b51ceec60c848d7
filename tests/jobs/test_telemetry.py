"""What a whole job of two ranks says of its steps, in the store, to TensorBoard and to a person."""

from __future__ import annotations

import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflop.records import RankSpan, StepObservation
from dflop.run.directory import RunDir
from tests.jobs.training import fresh, set_config, train
from tests.store.spooled import read_spool

NUM_STEPS, TRACE_EVERY, CHECKPOINT_EVERY = 5, 2, 3
WITHIN = ("forward", "backward", "receive_wait", "send", "reduce", "optimizer")

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(planned, tmp_path_factory) -> tuple[RunDir, str]:
    """(a run that was trained, what rank 0 said)."""
    folder = tmp_path_factory.mktemp("told")
    run = fresh(planned, folder)
    set_config(
        run, f"train.num_steps={NUM_STEPS}", f"train.trace_every_steps={TRACE_EVERY}",
        f"train.checkpoint_every={CHECKPOINT_EVERY}", "train.report_to=[tensorboard]",
    )  # fmt: skip
    return run, train(run)[0]


def observations(run: RunDir) -> dict[tuple[int, int], StepObservation]:
    return {(o.step, o.rank): o for o in read_spool(run.config().store, StepObservation)}


def spans(run: RunDir, step: int, rank: int) -> list[RankSpan]:
    found = [s for s in read_spool(run.config().store, RankSpan) if (s.step, s.rank) == (step, rank)]
    return sorted(found, key=lambda s: s.start_s)


@pytest.mark.parametrize("rank", [0, 1])
def test_spans_are_told_of_every_traced_step_and_checkpoints_of_every_step(trained, rank):
    """That they tile the step: `tests/train/test_step_trace.py`."""
    run, _ = trained
    seen = observations(run)
    told = {step: spans(run, step, rank) for step in range(NUM_STEPS)}
    checkpoints = [step for step in told for s in told[step] if s.name == "checkpoint"]
    assert checkpoints == [CHECKPOINT_EVERY - 1, NUM_STEPS - 1]
    for step, of_step in told.items():
        within = [s for s in of_step if s.name in WITHIN]
        assert {s.name for s in within} == (set(WITHIN) if step % TRACE_EVERY == 0 else set())
        if within:
            assert within[-1].start_s + within[-1].duration_s == pytest.approx(seen[step, rank].step_s)
            (data_wait,) = [s for s in of_step if s.name == "data_wait"]
            assert data_wait.start_s == -data_wait.duration_s == -seen[step, rank].data_wait_s


def test_a_person_reads_and_tensorboard_shows_every_step(trained):
    run, said = trained
    lines = re.findall(
        r"^step \d  (\d)/5 done  loss \d.*  ([\d.]+k?) tokens/s  rank 0 idle (\d+\.\d) %(?:  compute .*)?$",
        said,
        re.MULTILINE,
    )
    assert [int(step) for step, _, _ in lines] == [1, 2, 3, 4, 5]
    seen = observations(run)
    events = EventAccumulator(str(run.path / "tensorboard" / "train"))
    events.Reload()
    for name, field in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("time/step_s", "step_s")):
        expected = [getattr(seen[step, 0], field) for step in range(NUM_STEPS)]
        assert [e.value for e in events.Scalars(name)] == pytest.approx(expected, rel=1e-6)
    assert "speed/mfu_frac" not in events.Tags()["scalars"]
    assert len(events.Scalars("speed/predicted_saved_frac")) == NUM_STEPS
