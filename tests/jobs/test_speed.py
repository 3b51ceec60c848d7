"""What rank 0 says of how fast a step was."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from dflop.cost.flops import FlopCounter
from dflop.jobs.telemetry import MEMORY_EVERY_STEPS, SpeedCounter, Telemetry
from dflop.models.generic.routers import Router, softmax
from dflop.parallel.topology import seat_of
from dflop.records import LLM, ExpertLoad, MicrobatchSpan, StepFlops, StepObservation
from dflop.run.batches import TRAIN, GlobalBatches, job_steps
from dflop.run.directory import RunDir, family_of
from dflop.train.router_loss import RouterLoss
from dflop.units import count
from tests.builders import make_plan, random_batch
from tests.jobs.configs import make_config

VOCAB, BATCH_SIZE, NUM_RANKS = 1000, 8, 4
PEAK = 989.5e12
"""H100, bf16, dense: its data sheet."""
STEP_S, BUSY_S = 0.004, 0.001


def observation(step: int) -> StepObservation:
    return StepObservation(
        "small-1", 2, step, "balanced", 0, LLM, 0, 0, 0.003, STEP_S, BUSY_S, 0.5, 0.25, 0.0, 0.0, 2.5, 1.5, 80, 1e9, ()
    )


def test_utilisation_is_what_the_batch_asks_over_what_all_devices_could_do(tmp_path):
    config = make_config(
        tmp_path, "cluster.hardware=H100", "model.dtype=bfloat16", f"plan.global_batch_size={BATCH_SIZE}"
    )
    batches, rows = GlobalBatches(config, list(random_batch(3 * BATCH_SIZE, seed=1))), []
    seat, spool, memory = seat_of(make_plan({LLM: 1}), 0), SimpleNamespace(put=rows.append), {"process": 7, "cuda": 5}
    telemetry = Telemetry(RunDir(tmp_path / "small-1"), config, seat, "small-1", 2, spool, lambda: memory, True)
    family = family_of(config, VOCAB)
    telemetry.speed = SpeedCounter(config, family, batches, job_steps(config, TRAIN), NUM_RANKS)
    line = telemetry.observed(observation(1))
    telemetry.close()
    flops, tokens = FlopCounter(family.specs()).count(batches.at(1)), sum(s.num_llm_tokens for s in batches.at(1))
    mfu = flops / (NUM_RANKS * PEAK * STEP_S)
    assert rows[:2] == [observation(1), StepFlops("small-1", 2, 1, flops, NUM_RANKS * PEAK)]
    assert {row.kind: row.peak_bytes for row in rows[2:]} == memory
    assert line.startswith("loss 2.5000  4.0 ms (predicted 3.0 ms)  balanced  ")
    assert line.endswith(f"{count(round(tokens / STEP_S))} tokens/s  rank 0 idle 75.0 %  MFU {mfu * 100:.1f} %")
    span = MicrobatchSpan(0, 1, 9, 81, 0.1, 0.2, 0.0, 0.3, 0.3, 0.6, 0.1, 0.3)
    busy = telemetry.observed(replace(observation(1), spans=(span,)))
    assert busy == f"{line}  compute 400.0 ms: other programs used the cores (processor time 44.4 % of wall)"


def test_trackers_get_what_balancing_saves_by_the_simulator(tmp_path):
    config = make_config(tmp_path, "train.report_to=[tensorboard]")
    points = []
    seat, spool = seat_of(make_plan({LLM: 1}), 0), SimpleNamespace(put=lambda row: None)
    telemetry = Telemetry(RunDir(tmp_path / "small-1"), config, seat, "small-1", 2, spool)
    telemetry.curves = SimpleNamespace(add=lambda step, values, _at_s: points.append((step, values)))
    for step, arrival_s in ((3, 4.0), (4, 0.0)):  # the second was not simulated
        telemetry.saved(step, SimpleNamespace(predicted_step_s=3.0, arrival_step_s=arrival_s))
    assert points == [(3, {"time/predicted_arrival_step_s": 4.0, "speed/predicted_saved_frac": 0.25})]


class TwoSources:
    """Samples 0 to 9 are of `a.json`, the others of `b.json`; sample n has n tokens that carry loss."""

    def source(self, index):
        return "a.json" if index < 10 else "b.json"

    def shape(self, index):
        return SimpleNamespace(num_supervised_tokens=index)


def test_losses_of_samples_become_means_over_the_tokens_of_their_source():
    told, train = [], SimpleNamespace(report_to=())
    of = Telemetry(
        SimpleNamespace(path=None), SimpleNamespace(train=train), None, "run", 2, SimpleNamespace(put=told.append)
    )
    line = of.validated(7, {4: 8.0, 6: 2.0, 0: 0.0, 30: 75.0}, TwoSources(), 1.5)
    rows = [(row.step, row.split, row.source, row.loss, row.num_tokens, row.num_samples) for row in told]
    assert rows == [(7, "validation", "a.json", 1.0, 10, 3), (7, "validation", "b.json", 2.5, 30, 1)]
    assert line == "loss 2.1250 over 4 samples in 1.50 s (a.json 1.0000, b.json 2.5000)"
    assert of.validated(7, {4: 8.0}, TwoSources(), 1.5) == "loss 2.0000 over 1 samples in 1.50 s"


def test_what_layers_routed_is_told_with_the_steps_that_it_is_of():
    told, taken = [], iter([{3: [4, 0]}, {3: [70, 10]}])
    train, seat = SimpleNamespace(report_to=()), SimpleNamespace(rank=1)
    run = SimpleNamespace(path=None)
    of = Telemetry(run, SimpleNamespace(train=train), seat, "run", 2, SimpleNamespace(put=told.append))
    of.routed = SimpleNamespace(take=lambda: next(taken))
    for step in range(MEMORY_EVERY_STEPS + 1):
        of.observed(SimpleNamespace(step=step, rank=1, stage=0, dp_rank=1))
    loads = [row for row in told if isinstance(row, ExpertLoad)]
    assert loads == [
        ExpertLoad("run", 2, 0, 1, 0, 1, 1, 3, (4, 0)), ExpertLoad("run", 2, 20, 1, 0, 1, 20, 3, (70, 10))
    ]  # fmt: skip


def test_the_loss_of_routers_is_a_row_of_its_own():
    put, run = [], SimpleNamespace(path=None)
    train = SimpleNamespace(train=SimpleNamespace(report_to=()))
    of = Telemetry(run, train, SimpleNamespace(rank=0), "run", 2, SimpleNamespace(put=put.append))
    of.routers(3, RouterLoss())
    routers = RouterLoss({0: Router("mlp.gate", 4, 2, softmax)}, {0: 0.1})
    routers.value, routers.num_tokens, routers.num_samples = 1.5, 70, 6
    of.routers(4, routers)
    (row,) = put
    assert (row.step, row.split, row.source, row.loss, row.num_tokens) == (4, "routers", "llm", 1.5, 70)
