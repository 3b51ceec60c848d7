"""What is said of a step: metrics files that Prometheus' own parser reads and nobody waits for; how fast it was."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflop.cost.flops import FlopCounter
from dflop.jobs.telemetry import METRICS, MetricsFile, SpeedCounter, Telemetry, render
from dflop.parallel.topology import seat_of
from dflop.records import LLM, StepFlops, StepObservation
from dflop.run.batches import TRAIN, GlobalBatches, job_steps
from dflop.run.directory import RunDir, family_of
from tests.builders import make_plan, random_batch
from tests.jobs.configs import make_config

VOCAB, BATCH_SIZE, NUM_RANKS = 1000, 8, 4
PEAK = 989.5e12
"""H100, bf16, dense: its data sheet."""
STEP_S, BUSY_S = 0.004, 0.001
LABELS = {"run_id": 'a"b\\c\nd', "module": "llm", "stage": "0", "rank": "3"}


def parsed(text):
    """{name: (type, labels, value)} of every sample; counters are named as their samples are."""
    return {
        sample.name: (family.type, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_every_metric_with_its_type_and_labels():
    values = {name: float(n) + 0.1 for n, name in enumerate(METRICS)}
    found = parsed(render(values, LABELS))
    assert found == {name: (METRICS[name][0], LABELS, value) for name, value in values.items()}
    assert {name for name, (kind, _) in METRICS.items() if kind == "counter"} == {
        name for name in METRICS if name.endswith("_total")
    }
    assert all(family.documentation for family in text_string_to_metric_families(render(values, LABELS)))
    for value in (math.nan, math.inf, 1e-300, 12345678901234567890):
        (_, _, found) = parsed(render({"dflop_loss": value}, LABELS))["dflop_loss"]
        assert found == pytest.approx(value, nan_ok=True, rel=0)


def test_the_file_holds_what_was_told_last_and_sums_of_counts(tmp_path):
    before, path = threading.active_count(), tmp_path / "new" / "rank-3.prom"
    metrics = MetricsFile(path, LABELS, look=lambda: {"dflop_checkpoint_step": 20.0}, every_s=60.0)
    for step in range(5):
        metrics.update({"dflop_step": step}, {"dflop_data_wait_seconds_total": 0.5})
    for _ in range(2):
        metrics.close()
    assert threading.active_count() == before
    values = {name: value for name, (_, _, value) in parsed(path.read_text()).items()}
    assert values == {"dflop_step": 4.0, "dflop_data_wait_seconds_total": 2.5, "dflop_checkpoint_step": 20.0}
    assert [p.name for p in path.parent.iterdir()] == ["rank-3.prom"], "the collector reads whatever ends in .prom"


def test_a_slow_disk_keeps_nobody_waiting(tmp_path):
    """The thread that writes hangs; updates return all the same."""
    may_go_on, hangs = threading.Event(), threading.Event()

    def look():
        hangs.set()
        assert may_go_on.wait(60)
        return {}

    metrics = MetricsFile(tmp_path / "rank-0.prom", LABELS, look=look, every_s=0.0)
    metrics.update({"dflop_step": 0})
    assert hangs.wait(60)
    for step in range(1, 4):
        metrics.update({"dflop_step": step})
    may_go_on.set()
    metrics.close()
    assert parsed((tmp_path / "rank-0.prom").read_text())["dflop_step"][2] == 3.0


def observation(step: int) -> StepObservation:
    return StepObservation(
        "small-1", 2, step, "balanced", 0, LLM, 0, 0, 0.003, STEP_S, BUSY_S, 0.5, 0.25, 0.0, 0.0, 2.5, 1.5, 80, 1e9, ()
    )


@pytest.fixture
def told(tmp_path):
    """(telemetry of rank 0, rows that it spools, its run, samples of the batches)."""
    config = make_config(
        tmp_path, "cluster.hardware=H100", "model.dtype=bfloat16", f"plan.global_batch_size={BATCH_SIZE}"
    )
    shapes = list(random_batch(3 * BATCH_SIZE, seed=1))
    run, rows = RunDir(tmp_path / "small-1"), []
    telemetry = Telemetry(run, config, seat_of(make_plan({LLM: 1}), 0), "small-1", 2, SimpleNamespace(put=rows.append),
                          lambda: {"process": 7, "allocated": 5})  # fmt: skip
    batches = GlobalBatches(config, shapes)
    family = family_of(config, VOCAB)
    telemetry.speed = SpeedCounter(config, family, batches, job_steps(config, TRAIN), NUM_RANKS)
    yield telemetry, rows, run, (FlopCounter(family.specs()), batches)
    telemetry.close()


def shown(run: RunDir) -> dict[str, float]:
    return {name: value for name, (_, _, value) in parsed((run.path / "metrics" / "rank-0.prom").read_text()).items()}


def test_utilisation_is_what_the_batch_asks_over_what_all_devices_could_do(told):
    telemetry, rows, run, (counter, batches) = told
    line = telemetry.observed(observation(1))
    telemetry.close()
    flops, tokens = counter.count(batches.at(1)), sum(s.num_llm_tokens for s in batches.at(1))
    mfu = flops / (NUM_RANKS * PEAK * STEP_S)
    assert rows[:2] == [observation(1), StepFlops("small-1", 2, 1, flops, NUM_RANKS * PEAK)]
    assert [(row.kind, row.peak_bytes) for row in rows[2:]] == [("process", 7), ("allocated", 5)]
    assert shown(run)["dflop_mfu"] == pytest.approx(mfu)
    assert shown(run)["dflop_tokens_per_second"] == pytest.approx(tokens / STEP_S)
    assert line.startswith("loss 2.5000  4.0 ms (predicted 3.0 ms)  balanced  ")
    assert line.endswith(f"rank 0 idle 75.0 %  MFU {mfu * 100:.1f} %")
