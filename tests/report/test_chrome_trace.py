"""Traces: valid, and every slice is a row of what was recorded or of the simulation of what was predicted."""

import math
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dflop.records import LLM, Plan
from dflop.report.chrome_trace import INPUT, MEASURED, PREDICTED, TracedStep, chrome_trace
from dflop.report.observed_steps import MeasuredStep
from dflop.report.predicted import simulate_again
from tests.builders import make_inline_plan, make_plan
from tests.report.chrome_trace import problems_of
from tests.report.detailed import SPLIT, batch_of, observe_step, plan_step, spans_of

PLANS = {
    "split": SPLIT,
    "inline, tp 2": make_inline_plan(1, pp=2, tp=2, modules=("vision", LLM)),
    "deep encoder": make_plan({"vision": 2, LLM: 1}, llm_pp=2, encoder_pp=2, num_microbatches=3),
}
EVERY = 2
"""Steps are traced in full as often as this."""


def traced(plan: Plan, num_steps: int = 4) -> list[TracedStep]:
    found, at_s = [], 1.7e9
    for step in range(num_steps):
        batch = batch_of(step)
        step_plan = plan_step(plan, batch, step, "balanced", "run")
        seen = observe_step(plan, step_plan, batch, noise=0.1, started_at_s=at_s)
        spans = tuple(span for rank in seen for span in spans_of(plan, rank)) if step % EVERY == 0 else ()
        found.append(TracedStep(MeasuredStep(step, "balanced", tuple(seen)), plan, step_plan, spans))
        at_s += seen[0].step_s + 0.02
    return found


@pytest.fixture(scope="module")
def split() -> list[TracedStep]:
    return traced(SPLIT)


def slices(trace: dict[str, Any], track: int, rank: int | None = None) -> list[dict[str, Any]]:
    return [
        e
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["tid"] == track and (rank is None or e["pid"] == rank + 1)
    ]


@pytest.mark.parametrize("name", PLANS)
def test_slices_are_the_rows_of_the_store_and_the_simulation_of_their_predictions(name: str) -> None:
    steps = traced(replace(PLANS[name], sync_s=0.004))
    trace = chrome_trace("run", steps)
    assert problems_of(trace) == []
    assert trace["otherData"]["steps"] == "0 to 3"
    check_measured(trace, steps)
    check_predicted(trace, steps)


def check_measured(trace: dict[str, Any], steps: Sequence[TracedStep]) -> None:
    for step in steps:
        for rank in step.measured.ranks:
            own = [e for e in slices(trace, MEASURED, rank.rank) if e["args"]["step"] == step.measured.step]
            (whole,) = [e for e in own if e["name"] == f"step {step.measured.step}"]
            assert whole["dur"] == pytest.approx(1e6 * rank.step_s, abs=1e-3)
            assert whole["args"]["predicted_step_s"] == rank.predicted_step_s
            inside = {(e["name"], e["args"].get("microbatch", -1)): e for e in own}
            wanted = {
                (s.name if s.microbatch < 0 else f"{s.name} {s.microbatch}", s.microbatch): (s.start_s, s.duration_s)
                for s in step.spans
                if s.rank == rank.rank
                and s.name != "schedule_wait"
                and s.duration_s > 1e-9
                and s.name != "receive_wait"
            }
            if not step.spans:
                for s in rank.spans:
                    if s.forward_s > 1e-9:  # a microbatch without work for a stage is nothing to see
                        wanted[f"forward {s.microbatch}", s.microbatch] = s.forward_start_s, s.forward_s
                        wanted[f"backward {s.microbatch}", s.microbatch] = s.backward_start_s, s.backward_s
            assert wanted.keys() <= inside.keys()
            for key, (start_s, duration_s) in wanted.items():
                assert inside[key]["ts"] - whole["ts"] == pytest.approx(1e6 * start_s, abs=3e-3)
                assert inside[key]["dur"] == pytest.approx(1e6 * duration_s, abs=3e-3)


def test_waits_and_bytes_of_a_traced_step_are_told(split: list[TracedStep]) -> None:
    steps = split[:1]
    trace = chrome_trace("run", steps)
    rows = Counter(s.name for s in steps[0].spans if s.duration_s > 1e-9)
    told = Counter(e["name"].split()[0] for track in (MEASURED, INPUT) for e in slices(trace, track))
    for name in ("receive_wait", "forward", "backward", "reduce", "optimizer", "data_wait", "schedule_wait"):
        assert told[name] == rows[name] > 0, name
    assert all(e["args"]["num_bytes"] == 100 for e in slices(trace, MEASURED) if e["name"].startswith("receive"))


def check_predicted(trace: dict[str, Any], steps: Sequence[TracedStep]) -> None:
    for step in steps:
        assert step.plan is not None
        assert step.step_plan is not None
        again = simulate_again(step.plan, step.step_plan, step.measured.ranks)
        assert again is not None
        begin = min(e["ts"] for e in slices(trace, MEASURED) if e["name"] == f"step {step.measured.step}")
        for rank in step.measured.ranks:
            own = [
                e
                for track in range(PREDICTED, PREDICTED + 3)
                for e in slices(trace, track, rank.rank)
                if e["args"]["step"] == step.measured.step
            ]
            told = {e["name"]: e for e in own}
            assert told[f"step {step.measured.step}"]["ts"] == pytest.approx(begin, abs=1e-3)
            whole_us = 1e6 * (again.pipeline_s + step.plan.sync_s)
            assert told[f"step {step.measured.step}"]["dur"] == pytest.approx(whole_us, abs=3e-3)
            ops = again.of((rank.module, rank.stage, rank.dp_rank))
            assert len(own) == len([op for op in ops if op.duration_s > 0]) + 2
            for op in (op for op in ops if op.duration_s > 0):
                found = told[f"{'forward' if op.phase == 'F' else 'backward'} {op.microbatch}"]
                assert found["ts"] - begin == pytest.approx(1e6 * op.start_s, abs=3e-3)
                assert found["dur"] == pytest.approx(1e6 * op.duration_s, abs=3e-3)


def test_arrows_lead_from_what_sent_to_what_waited(split: list[TracedStep]) -> None:
    trace = chrome_trace("run", split[:1])
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    found = Counter((a["s"]["pid"] - 1, a["f"]["pid"] - 1, a["s"]["name"]) for a in arrows.values())
    assert found[3, 4, "rows"] == found[4, 3, "gradients"] == SPLIT.num_microbatches
    assert {pair[:2] for pair in found} <= {(r, 3) for r in (0, 1, 2)} | {(3, r) for r in (0, 1, 2)} | {(3, 4), (4, 3)}


def shifted(step: TracedStep, by_s: float, of_ranks: Container[int] = range(99)) -> TracedStep:
    """A step as seen by ranks whose clocks are wrong."""
    ranks = step.measured.ranks
    ranks = tuple(replace(r, observed_at_s=r.observed_at_s + by_s * (r.rank in of_ranks)) for r in ranks)
    return replace(step, measured=replace(step.measured, ranks=ranks))


def test_wrong_clocks_and_losses_make_no_wrong_trace(split: list[TracedStep]) -> None:
    first, second, *_ = split
    assert problems_of(chrome_trace("run", [first, shifted(second, -5.0)])) == [], "a clock that was set back"
    assert problems_of(chrome_trace("run", [shifted(first, -0.05, of_ranks={3})])) == [], "no arrow from the future"
    ranks = tuple(replace(r, loss=math.nan) for r in first.measured.ranks)
    trace = chrome_trace("run", [replace(first, measured=replace(first.measured, ranks=ranks))])
    assert problems_of(trace) == []
    assert "loss" not in next(e for e in slices(trace, MEASURED) if e["name"] == "step 0")["args"]


def test_without_a_plan_or_predictions_what_was_measured_is_there(split: list[TracedStep]) -> None:
    step = split[0]
    for bare in (replace(step, plan=None), replace(step, step_plan=None)):
        trace = chrome_trace("run", [bare])
        assert problems_of(trace) == []
        assert slices(trace, MEASURED)
        assert not slices(trace, PREDICTED)
    assert chrome_trace("run", [])["traceEvents"] == []
