"""The bench of real steps says what its observations say: fed with simulated ones, it must find what was simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.devices import A100
from dflop.cost.model import CostModel
from dflop.records import LLM, MicrobatchSpan, SampleShape, StepObservation, StepPlan
from dflop.simulate.step import simulate_step
from tests.bench.schedule.real_cases import Case, family_of
from tests.bench.schedule.real_compare import Outcome, compare
from tests.bench.schedule.real_costs import Costs
from tests.bench.schedule.real_data import MAX_TEXT_TOKENS, Row, Rows, small_shape

PIPELINE, REPLICAS = Case("equal", "pipeline", 24, 4), Case("equal", "replicas", 24, 2)


@pytest.fixture(scope="module")
def costs() -> Costs:
    specs = family_of("equal").specs()
    tables = analytic_cost_tables(specs, A100, profile_key="bench")
    # Without links, for observations tell nothing of messages on the way.
    return Costs(specs, CostModel(tables, specs=specs, extrapolate=True))


def _observed(
    case: Case, costs: Costs, step_plan: StepPlan, batch: Sequence[SampleShape], slower: float
) -> list[StepObservation]:
    """What the processes would see were the simulator right, on a machine that is `slower` than predicted."""
    plan, durations = case.plan, costs.durations(case.plan, step_plan, batch)
    pipeline_s = simulate_step(plan, step_plan.work, durations).makespan_s
    tail_s, found = costs.tail_s(case, batch), []
    seats = [("vision", 0), (LLM, 0)] if case.layout == "pipeline" else [(LLM, 0), (LLM, 1)]
    for rank, (module, dp_rank) in enumerate(seats):
        parts = [module] if case.layout == "pipeline" else ["vision", LLM]
        spans = []
        for k in range(case.num_microbatches):
            both = [durations[part, 0, dp_rank][k] for part in parts]
            forward_s, backward_s = (slower * sum(seconds) for seconds in zip(*both, strict=True))
            spans.append(
                MicrobatchSpan(
                    k, 0, 0, 0, 0.0, 0.0, 0.0, forward_s, 0.0, backward_s, forward_s, backward_s
                )
            )  # fmt: skip
        busy_s, step_s = sum(s.forward_s + s.backward_s for s in spans), slower * (pipeline_s + tail_s)
        found.append(
            StepObservation(
                run_id="", attempt=0, step=step_plan.step, policy="", rank=rank, module=module, stage=0,
                dp_rank=dp_rank, predicted_step_s=0.0, step_s=step_s, busy_s=busy_s, data_wait_s=0.0,
                schedule_wait_s=0.0, reduce_s=slower * tail_s, optimizer_s=0.0, loss=0.0, grad_norm=0.0,
                num_supervised_tokens=1, observed_at_s=0.0, spans=tuple(spans),
            )
        )  # fmt: skip
    return found


def _outcome(case: Case, costs: Costs, slower: Sequence[float], slower_arrival: float = 1.0) -> Outcome:
    """Of two global batches; `slower` per round."""
    rows = Rows(None, family_of("equal"))
    batches = [rows.batch(case.num_samples, [seed], seed * case.num_samples) for seed in range(2)]
    step_plans = costs.schedule(case, batches, case.policies)
    rounds = [
        [
            _observed(
                case, costs, p, batches[i // len(case.policies)],
                factor * (slower_arrival if p.run_id == "arrival" else 1.0),
            )
            for i, p in enumerate(step_plans)
        ]
        for factor in slower
    ]  # fmt: skip
    return compare(case, costs, step_plans, batches, rounds)


@pytest.mark.parametrize("case", [PIPELINE, REPLICAS], ids=lambda case: case.layout)
def test_where_the_simulator_is_right_measured_is_simulated(case: Case, costs: Costs) -> None:
    outcome = _outcome(case, costs, slower=(1.0, 3.0))
    assert outcome.ratios["arrival / balanced"].simulated > 1.0
    for r in outcome.ratios.values():
        assert (r.measured, r.profiled, r.replayed, r.replayed_cpu) == pytest.approx((r.simulated,) * 4)
        assert r.noise_frac == pytest.approx(0.0)
    for p in outcome.policies.values():
        assert p.measured_idle_frac == pytest.approx(p.simulated_idle_frac, abs=1e-9)
    assert outcome.replay_ratio == pytest.approx(1.0)
    assert set(outcome.compute_ratio) == ({"vision", LLM} if case.layout == "pipeline" else {LLM})
    assert list(outcome.compute_ratio.values()) == pytest.approx([0.5] * len(outcome.compute_ratio))


def test_what_the_costs_do_not_know_shows_in_measured_and_replayed(costs: Costs) -> None:
    r = _outcome(PIPELINE, costs, slower=(1.0,), slower_arrival=1.5).ratios["arrival / balanced"]
    assert r.measured == pytest.approx(1.5 * r.simulated)
    assert r.replayed == pytest.approx(r.measured)


def test_corrections_bring_what_is_predicted_nearer_to_what_was_seen(costs: Costs) -> None:
    rows = Rows(None, family_of("equal"))
    batches = [rows.batch(24, [seed], 24 * seed) for seed in range(4)]
    step_plans = costs.schedule(PIPELINE, batches, ("arrival",))
    steps = [_observed(PIPELINE, costs, p, b, 2.0) for p, b in zip(step_plans, batches, strict=True)]
    corrected = costs.corrected(PIPELINE, step_plans, batches, steps)
    assert set(corrected.cost.corrections) == {"vision", LLM}
    assert list(corrected.cost.corrections.values()) == pytest.approx([2.0] * 2, rel=0.01)
    assert not corrected.uncorrected().cost.corrections


def test_no_policy_always_comes_first(costs: Costs) -> None:
    rows = Rows(None, family_of("equal"))
    batches = [rows.batch(24, [seed], 24 * seed) for seed in range(3)]
    step_plans = costs.schedule(PIPELINE, batches, PIPELINE.policies)
    assert {p.run_id for p in step_plans[::3]} == set(PIPELINE.policies)
    assert all(set(p.sample_index) == set(range(24 * (i // 3), 24 * (i // 3 + 1))) for i, p in enumerate(step_plans))


def test_rows_of_a_table_keep_their_kind_and_lose_their_size(tmp_path: Path) -> None:
    columns = {
        "id": ["a", "b", "c", "d", "e"],
        "prompt_tokens": [3000, 10, 10, 10, 10],
        "response_tokens": [1000, 10, 10, 10, 10],
        "image_w": [[], [640], [640, 640], [], []],
        "image_h": [[], [480], [480, 480], [], []],
        "video_w": [[], [], [], [640], []],
        "video_h": [[], [], [], [480], []],
        "video_frames": [[], [], [], [1200], []],
        "video_fps": [[], [], [], [30.0], []],
        "video_seconds": [[], [], [], [None], []],
        "audio_seconds": [[], [], [], [], [4.0]],
    }
    nested = {c: pl.List(pl.Float64) for c in columns if c.startswith(("image", "video", "audio"))}
    pl.DataFrame(columns, schema_overrides=nested).write_parquet(tmp_path / "sizes.parquet")
    batch = Rows(tmp_path / "sizes.parquet", family_of("equal")).batch(200, [0])
    kinds = {tuple(i.kind for i in s.items) for s in batch}
    assert kinds == {(), ("image",), ("image", "image"), ("video",)}  # speech is left out
    text = next(s for s in batch if not s.items)
    assert (text.num_text_tokens, text.num_supervised_tokens) == (MAX_TEXT_TOKENS, MAX_TEXT_TOKENS // 4)
    video = next(s.items[0] for s in batch if s.items and s.items[0].kind == "video")
    assert (video.num_frames, video.grid[0], video.width_px) == (5, 5, 160)  # 40 s, a frame every 8 s


def test_one_token_remains_that_carries_no_loss() -> None:
    shape = small_shape(Row(0, 1, ()), family_of("equal"), 7)
    assert 1 <= shape.num_supervised_tokens < shape.num_text_tokens
