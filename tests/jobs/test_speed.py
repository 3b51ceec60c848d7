"""How fast a step was, where the peak of the devices is known: in the line, in the metrics, in the store."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflop.cost.flops import FlopCounter
from dflop.jobs.rundir import RunDir, trainable_of
from dflop.jobs.steps import TRAIN, GlobalBatches, job_steps
from dflop.jobs.telemetry import SpeedCounter, Telemetry
from dflop.parallel.topology import seat_of
from dflop.records import LLM, StepFlops, StepObservation
from dflop.train.trace import Span
from tests.builders import make_plan, random_batch
from tests.jobs.configs import make_config

VOCAB, BATCH_SIZE, NUM_RANKS = 1000, 8, 4
PEAK = 989.5e12
"""H100, bf16, dense: its data sheet."""
STEP_S, BUSY_S = 0.004, 0.001


class Spool:
    """Keeps what it is handed."""

    def __init__(self):
        self.rows = []

    def put(self, row):
        self.rows.append(row)


def observation(step: int) -> StepObservation:
    return StepObservation(
        "small-1", 2, step, "balanced", 0, LLM, 0, 0, 0.003, STEP_S, BUSY_S, 0.5, 0.25, 0.0, 0.0, 2.5, 1.5, 80, 1e9, ()
    )


@pytest.fixture
def told(tmp_path):
    """(telemetry of rank 0, its spool, its run, samples of the batches)."""
    config = make_config(
        tmp_path, "cluster.hardware=H100", "model.dtype=bfloat16", f"plan.global_batch_size={BATCH_SIZE}"
    )
    shapes = list(random_batch(3 * BATCH_SIZE, seed=1))
    run, spool = RunDir(tmp_path / "small-1"), Spool()
    telemetry = Telemetry(run, config, seat_of(make_plan({LLM: 1}), 0), "small-1", 2, spool)
    batches = GlobalBatches(config, shapes)
    family = trainable_of(config, VOCAB)
    telemetry.count_speed(SpeedCounter(config, family, batches, job_steps(config, TRAIN), NUM_RANKS))
    yield telemetry, spool, run, (FlopCounter(family.specs(), VOCAB), batches)
    telemetry.close()


def test_utilisation_is_what_the_batch_asks_over_what_all_devices_could_do(told):
    telemetry, spool, run, (counter, batches) = told
    line = telemetry.observed(observation(1))
    telemetry.close()
    flops, tokens = counter.count(batches.at(1)), sum(s.num_llm_tokens for s in batches.at(1))
    mfu = flops / (NUM_RANKS * PEAK * STEP_S)
    assert spool.rows == [observation(1), StepFlops("small-1", 2, 1, flops, NUM_RANKS * PEAK)]
    text = (run.path / "metrics" / "rank-0.prom").read_text()
    found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert found["dflop_mfu"] == pytest.approx(mfu)
    assert found["dflop_tokens_per_second"] == pytest.approx(tokens / STEP_S)
    assert line.startswith("loss 2.5000  4.0 ms (predicted 3.0 ms)  balanced  ")
    assert line.endswith(f"rank 0 idle 75.0 %  MFU {mfu * 100:.1f} %")


def test_waits_and_accidents_add_up(told):
    telemetry, _, run, _ = told
    for step in range(3):
        telemetry.observed(observation(step))
    telemetry.skipped_sample()
    telemetry.skipped_sample()
    telemetry.scheduler_event()
    telemetry.close()
    text = (run.path / "metrics" / "rank-0.prom").read_text()
    found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert found["dflop_data_wait_seconds_total"] == 1.5
    assert found["dflop_schedule_wait_seconds_total"] == 0.75
    assert (found["dflop_skipped_samples_total"], found["dflop_scheduler_events_total"]) == (2, 1)


def test_spans_carry_the_seat(told):
    telemetry, spool, _, _ = told
    telemetry.traced(4, [Span("send", 3, 0.5, 0.25, 64)])
    (row,) = spool.rows
    assert (row.run_id, row.attempt, row.step, row.rank, row.module, row.tp_rank) == ("small-1", 2, 4, 0, LLM, 0)
    assert (row.name, row.microbatch, row.start_s, row.duration_s, row.num_bytes) == ("send", 3, 0.5, 0.25, 64)
