"""`dflop trace` out of a store: which steps, and that every slice is one of its rows."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflop.errors import ConfigError
from dflop.report.chrome_trace import MEASURED
from dflop.run.directory import RunDir
from dflop.store import console
from dflop.views.trace_window import choose_steps, write_trace
from tests.jobs.finished import TRACE_EVERY
from tests.report.chrome_trace import problems_of
from tests.report.detailed import SPLIT

NUM_STEPS = 6


def rows(finished: RunDir, sql: str, **params: Any) -> list[tuple]:
    return console.query(finished.config().store, sql, params or None)[1]


def events(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = json.loads(data)
    assert problems_of(found) == []
    return found["traceEvents"]


def totals(found: list[dict[str, Any]], *names: str) -> dict[tuple[int, int, str], float]:
    """Seconds by (rank, step, name)."""
    total: Counter[tuple[int, int, str]] = Counter()
    for e in found:
        if e["ph"] == "X" and e["tid"] == MEASURED and e["name"].split()[0] in names:
            total[e["pid"] - 1, e["args"]["step"], e["name"].split()[0]] += e["dur"] / 1e6
    return dict(total)


def test_a_run_has_its_trace_beside_its_report_and_every_slice_is_a_row_of_the_store(finished: RunDir) -> None:
    made = write_trace(finished)
    assert made.path == finished.path / "trace.json"
    assert (made.first_step, made.last_step, made.num_steps, made.num_predicted) == (0, 5, NUM_STEPS, NUM_STEPS)
    assert not [path for path in finished.path.iterdir() if path.name.endswith(".tmp")]
    found = events(made.path)
    assert (len(found), made.path.stat().st_size) == (made.num_events, made.num_bytes)
    sql = (
        "select rank, step, list_sum([s.forward_s for s in spans]), list_sum([s.backward_s for s in spans]) "
        "from step_observation where run_id = $run_id"
    )
    wanted = {}
    for rank, step, forward_s, backward_s in rows(finished, sql, run_id=finished.run_id):
        wanted[rank, step, "forward"], wanted[rank, step, "backward"] = forward_s, backward_s
    assert totals(found, "forward", "backward") == pytest.approx(wanted, abs=1e-7)
    assert len(wanted) == 2 * NUM_STEPS * SPLIT.num_processes

    names = ("receive_wait", "reduce", "optimizer", "data_wait")
    sql = (
        "select rank, step, name, sum(duration_s) from rank_span "
        "where run_id = $run_id and list_contains($names, name) group by all having sum(duration_s) > 1e-9"
    )
    wanted = {row[:3]: row[3] for row in rows(finished, sql, run_id=finished.run_id, names=list(names))}
    told = totals(found, *names)
    traced = {key: seconds for key, seconds in told.items() if key[1] % TRACE_EVERY == 0}
    assert traced == pytest.approx(wanted, abs=1e-7)
    waits = {step for _, step, name in told if name == "receive_wait"}
    assert waits == {0, 2, 4}, "steps that were not traced tell compute and update only"

    predicted = {e["args"]["step"]: e["args"]["pipeline_s"] for e in found if "pipeline_s" in e.get("args", {})}
    sql = "select distinct step, predicted_step_s from step_plan where run_id = $run_id"
    assert predicted == pytest.approx(dict(rows(finished, sql, run_id=finished.run_id)))


def test_a_window_names_steps_that_were_observed() -> None:
    for window, chosen in (
        (None, [5, 6, 9]), ("5", [5]), ("5:9", [5, 6]), ("6:", [6, 9]), (":6", [3, 4, 5]), (" 4:100 ", [4, 5, 6, 9]),
        (":", [3, 4, 5, 6, 9]),
    ):  # fmt: skip
        assert choose_steps([9, 3, 4, 5, 6], window, most=3) == chosen
    for steps, window, told in (
        ([3, 4, 5], "x", "cannot read"), ([3, 4, 5], "1:2:3", "cannot read"), ([3, 4, 5], "7:9", "was observed"),
        ([3, 4, 5], "-3:", "cannot read"), ([], None, "no step of this run"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            choose_steps(steps, window)
