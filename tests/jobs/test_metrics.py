"""Metrics files: Prometheus' own parser reads them, nobody waits for them, and a broken folder costs nothing else."""

from __future__ import annotations

import math
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflop.jobs.metrics import METRICS, MetricsFile, render

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
    assert all(family.documentation for family in text_string_to_metric_families(render(values, LABELS)))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-300, 12345678901234567890])
def test_values_survive(value):
    (_, _, found) = parsed(render({"dflop_loss": value}, LABELS))["dflop_loss"]
    assert found == pytest.approx(value, nan_ok=True, rel=0)


def test_counters_are_named_as_prometheus_wants_them():
    assert {name for name, (kind, _) in METRICS.items() if kind == "counter"} == {
        name for name in METRICS if name.endswith("_total")
    }


def test_the_file_holds_what_was_told_last_and_sums_of_counts(tmp_path):
    path = tmp_path / "new" / "rank-3.prom"
    metrics = MetricsFile(path, LABELS, look=lambda: {"dflop_checkpoint_step": 20.0}, every_s=60.0)
    for step in range(5):
        metrics.update({"dflop_step": step}, {"dflop_data_wait_seconds_total": 0.5})
    metrics.close()
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


def test_a_folder_that_cannot_be_written_is_said_once_and_taken_up_again(tmp_path, capfd):
    folder = tmp_path / "metrics"
    folder.write_text("in the way")
    looked = threading.Semaphore(0)

    def look():
        looked.release()
        return {}

    metrics = MetricsFile(folder / "rank-0.prom", LABELS, look=look, every_s=0.0)
    for step in range(3):
        metrics.update({"dflop_step": step})
        assert looked.acquire(timeout=60)
    folder.unlink()
    metrics.close()
    assert capfd.readouterr().err.count("metrics cannot be written") == 1
    assert parsed((folder / "rank-0.prom").read_text())["dflop_step"][2] == 2.0


def test_close_may_be_called_twice_and_ends_the_thread(tmp_path):
    before = threading.active_count()
    metrics = MetricsFile(tmp_path / "rank-0.prom", LABELS)
    metrics.close()
    metrics.close()
    assert threading.active_count() == before
