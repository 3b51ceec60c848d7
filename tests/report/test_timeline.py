"""The timeline of a batch: every span is a bar in its place, with what was predicted below it."""

import re
from html import unescape

from dflop.records import LLM
from dflop.report.comparison import BatchPair
from dflop.report.gantt import BACKWARD, FORWARD, MAX_LANES, UPDATE
from dflop.report.observed_steps import MeasuredStep
from dflop.report.summary import RunSummary
from dflop.report.timeline import batch_gantt, batch_steps
from tests.builders import make_plan
from tests.report.runs import HOSTILE, make_span, observe


def pair_of(run: RunSummary) -> BatchPair:
    assert run.comparison is not None
    pair = run.comparison.typical_pair()
    assert pair is not None
    return pair


def test_both_policies_are_there_with_all_ranks_and_every_span_where_it_ran(run: RunSummary) -> None:
    pair = pair_of(run)
    pictures = batch_steps(pair, run.plan, run.compare_plans, run.num_cores)
    assert [picture.title.split(":")[0] for picture in pictures] == ["arrival", "balanced"]
    for step, picture in zip(pair.typical(), pictures, strict=True):
        assert [lane.name for lane in picture.lanes] == [
            "0: vision pp0 dp0", "1: vision pp0 dp1", "2: audio pp0 dp0", "3: llm pp0 dp0", "4: llm pp1 dp0",
        ]  # fmt: skip
        for rank, lane in zip(step.ranks, picture.lanes, strict=True):
            assert lane.thin
            bars = {(bar.kind, bar.microbatch): (bar.start_s, bar.duration_s) for bar in lane.bars}
            wanted = {(FORWARD, s.microbatch): (s.forward_start_s, s.forward_s) for s in rank.spans if s.forward_s}
            wanted |= {(BACKWARD, s.microbatch): (s.backward_start_s, s.backward_s) for s in rank.spans if s.backward_s}
            update_s = rank.reduce_s + rank.optimizer_s
            assert bars == wanted | {(UPDATE, -1): (rank.step_s - update_s, update_s)}


def test_bars_tell_their_microbatch_and_both_times(run: RunSummary) -> None:
    svg = batch_gantt(pair_of(run), run.plan, run.compare_plans, run.num_cores)
    told = [unescape(title) for title in re.findall(r"<path[^>]*><title>([^<]*)</title></path>", svg)]
    pictures = batch_steps(pair_of(run), run.plan, run.compare_plans, run.num_cores)
    assert sorted(told) == sorted(bar.hint for picture in pictures for lane in picture.lanes for bar in lane.bars)
    assert any(
        re.fullmatch(r"0: vision pp0 dp0: forward of microbatch 0, .* compute .*, predicted .* ms", t) for t in told
    )


def test_of_many_ranks_some_are_shown_without_predictions_and_both_are_said() -> None:
    ranks = tuple(observe(0, r, module=HOSTILE, spans=[make_span(0, 0.1, 0.2)]) for r in range(MAX_LANES + 9))
    pair = BatchPair((0,), (MeasuredStep(0, "arrival", ranks),), (MeasuredStep(1, "balanced", ranks[:3]),))
    many, few = batch_steps(pair, make_plan({LLM: 1}))
    assert (len(many.lanes), many.left_out) == (MAX_LANES, f"first {MAX_LANES} of {MAX_LANES + 9} processes")
    assert (len(few.lanes), few.left_out) == (3, "")
    assert "no predictions" in few.title
    assert not any(lane.thin for lane in few.lanes)
    assert "<script" not in batch_gantt(pair, make_plan({LLM: 1}))
