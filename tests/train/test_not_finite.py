"""Values that are not finite, wherever they come from: no rank updates, all end together, no checkpoint holds them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dflop.errors import DflopError, TrainError
from dflop.records import LLM, Plan
from dflop.train.blocks import SafeReader
from dflop.train.checkpoint import Checkpointer
from dflop.train.finite import MAX_SKIPPED, SkippedSteps, listed
from dflop.train.loop import Hooks
from dflop.train.manifest import candidates, read_latest
from dflop.train.plan_source import PlanMessage
from tests.train.layouts import IMAGES, Layout
from tests.train.rank import Rank, loop_settings
from tests.train.ranks import run_ranks
from tests.train.synthetic import ALL, SyntheticSource, make_shapes, make_step_plan, sharing_optimizer

NUM_STEPS, BATCH_SIZE = 6, 6
SHAPES = make_shapes(NUM_STEPS * BATCH_SIZE, seed=4, kinds=IMAGES)
ONE_RANK = ({"vision": 2, LLM: 4},)
ENDS = ({"vision": 2, LLM: 1}, {LLM: 3})
LAYOUTS = {
    "pp2": (Layout(ENDS),),
    "vision + llm dp2, ZeRO-1": (Layout({"vision": (1, 1), LLM: (1, 2)}), LLM),
    "FSDP2": (Layout(ONE_RANK, dp=2, sharded=ALL),),
    "tp2": (Layout(ONE_RANK, tp=2),),
}
"""Layout, and modules that share out their optimizer."""
LARGER = {
    "vision dp2 + llm pp2, FSDP2": (Layout({"vision": (1, 2), LLM: (2, 1)}, sharded=ALL),),
    "tp2 dp2, FSDP2": (Layout(ONE_RANK, tp=2, dp=2, sharded=ALL),),
    "pp2 dp2, FSDP2, tied": (Layout(ENDS, dp=2, tied=True, sharded=ALL),),
    "vision tp2 + llm pp2 dp2, ZeRO-1, tied": (Layout({"vision": (1, 1, 2), LLM: (2, 2)}, tied=True), LLM),
    "dp4, FSDP2 in twos": (Layout(ONE_RANK, dp=4, sharded=2),),
}
ALONE = (Layout(ONE_RANK),)
EVERY = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.lane("layouts")) for name in LARGER)]


def batch_of(step):
    return SHAPES[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]


def image_of(step):
    """A sample of the step's batch with an image."""
    return next(s.sample_index for s in batch_of(step) if s.items)


class InfinitePixel(SyntheticSource):
    """One pixel of one image of these steps is infinite."""

    def __init__(self, steps: Collection[int]) -> None:
        super().__init__(SHAPES)
        self._samples = {image_of(step) for step in steps}

    def array(self, sample_index: int, item: int) -> np.ndarray:
        found = super().array(sample_index, item)
        if sample_index in self._samples and item == 0:
            found.flat[0] = np.inf
        return found


class Plans:
    """In step `ends_at` the job is killed."""

    def __init__(self, plan: Plan, ends_at: int | None) -> None:
        self._plan, self._ends_at = plan, ends_at

    def get(self, step: int) -> PlanMessage:
        if step == self._ends_at:
            raise ConnectionError("killed")
        return PlanMessage(make_step_plan(self._plan, batch_of(step), step, text_only_slot=False), {})


@dataclass
class Seen:
    """What one rank saw of a job."""

    skipped: dict[int, str]
    losses: dict[int, float]
    error: str
    where: str
    weights: dict[str, torch.Tensor]


def job(
    rank: int, folder: Path, how: tuple[Any, ...], bad_steps: Collection[int] = (), *, rate: float = 0.01,
    decay: float = 0.01, every: int = 2, keep: int = 2, spike: tuple[int, int] | None = None,
    ends_at: int | None = None, stops_in: int | None = None,
) -> Seen:  # fmt: skip
    """A start of a job.

    Args:
        rank: Of the process.
        folder: Of the job.
        how: One of `LAYOUTS`.
        bad_steps: Steps with an infinite pixel.
        rate: Of learning.
        decay: Of weights.
        every: Steps from checkpoint to checkpoint.
        keep: Checkpoints.
        spike: (rank, step) in which a gradient is infinite though every loss is finite.
        ends_at: Step in which all ranks are killed.
        stops_in: Step behind which the job is asked to stop.
    """
    (layout, *sharing), subject = how, how[0].subject
    plan = sharing_optimizer(layout.plan, *sharing)
    it = Rank(rank, plan, subject.family, subject.build(), weight_decay=decay)
    settings = loop_settings("run", NUM_STEPS, rate, checkpoint_every=every)
    seen = Seen({}, {}, "", "", {})
    if spike is not None and rank == spike[0]:
        weight = next(p for name, p in it.names.items() if name.endswith("layernorm.weight"))
        weight.register_hook(lambda g: torch.full_like(g, math.inf) if len(seen.losses) == spike[1] else g)
    hooks = Hooks(
        lambda o: seen.losses.update({o.step: o.loss}), lambda *event: None,
        on_event=lambda step, kind, reason: seen.skipped.update({step: reason} if kind == "not_finite" else {}),
        is_told_to_stop=lambda: len(seen.losses) == stops_in,
    )  # fmt: skip
    checkpointer = Checkpointer(folder / "checkpoints", it.stages, it.optimizer, it.groups, it.parts, keep=keep)
    trainer = it.trainer(settings, InfinitePixel(bad_steps), Plans(plan, ends_at), hooks, checkpointer=checkpointer)
    try:
        trainer.run()
    except (DflopError, ConnectionError) as error:
        checkpointer.close()
        seen.error, seen.where = f"{type(error).__name__}: {error}", getattr(error, "where", "")
    it.optimizer.wait()
    seen.weights = {name: p.detach().clone() for name, p in it.names.items()}
    return seen


def start(folder, how, *given, **options):
    """What every rank saw of a start of a job; and the names of its checkpoints, all of them finite."""
    folder.mkdir(exist_ok=True)
    ranks = run_ranks(_job, how[0].plan.num_processes, folder, how, given, options)
    checkpoints = sorted(candidates(folder / "checkpoints"))
    assert not any(not_finite(folder / "checkpoints" / name) for name in checkpoints)
    assert all((r.skipped, r.error, r.where) == (ranks[0].skipped, ranks[0].error, ranks[0].where) for r in ranks)
    return ranks, [int(name.removeprefix("step-")) for name in checkpoints]


def _job(rank, folder, how, given, options):
    return job(rank, folder, how, *given, **options)


def not_finite(checkpoint):
    """Names of weights and moments of a checkpoint that are not finite."""
    reader = SafeReader(checkpoint)
    tensors = {name: of.empty() for name, of in reader.index.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other processes
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    return [name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]


@pytest.mark.parametrize("name", EVERY)
def test_an_infinite_pixel_costs_its_step_on_every_rank_and_names_the_sample(name, tmp_path):
    ranks, checkpoints = start(tmp_path, (LAYOUTS | LARGER)[name], [2])
    assert not ranks[0].error
    assert list(ranks[0].skipped) == [2]
    assert checkpoints == [4, 6]
    for seen in ranks:
        assert [step for step, loss in seen.losses.items() if not math.isfinite(loss)] == [2]
        assert list(seen.losses) == list(range(NUM_STEPS))
        assert all(p.isfinite().all() for p in seen.weights.values())
    samples = ranks[0].skipped[2].partition("no update; ")[2]
    count, named = samples.split(f" of {BATCH_SIZE} samples: ")
    assert str(image_of(2)) in named.split(", ")
    assert int(count) == len(named.split(", ")) < BATCH_SIZE, "samples of microbatches that went well are no suspects"


@pytest.mark.parametrize("name", EVERY)
def test_weights_that_diverge_end_the_job_after_three_steps(name, tmp_path):
    ranks, checkpoints = start(tmp_path, (LAYOUTS | LARGER)[name], rate=1e30, every=1)
    assert list(ranks[0].skipped) == [1, 2, 3]
    assert ranks[0].error.startswith("TrainError: loss or gradient norm was not finite in 3 steps in a row (1, 2, 3)")
    assert "train.learning_rate" in ranks[0].error
    for step in (1, 2, 3):
        assert f"step {step}, samples {', '.join(str(s.sample_index) for s in batch_of(step))}" in ranks[0].where
    assert checkpoints == [1], "none is saved while steps are skipped"


@pytest.mark.parametrize("name", ["pp2", "FSDP2", "tp2"])
def test_ruined_weights_are_not_saved(name, tmp_path):
    ranks, checkpoints = start(tmp_path, LAYOUTS[name], rate=3e37, decay=11.3, every=1)
    assert (ranks[0].skipped, checkpoints) == ({}, [])
    assert "has values that are not finite after step 0: no checkpoint was written" in ranks[0].error


def test_a_job_goes_on_from_its_good_checkpoint_when_the_cause_is_gone(tmp_path):
    how = LAYOUTS["pp2"]
    ranks, checkpoints = start(tmp_path / "a", how, [2, 3, 4], every=1)
    assert "(2, 3, 4)" in ranks[0].error
    assert checkpoints == [1, 2], "three failures push out no good one"
    again, checkpoints = start(tmp_path / "a", how, every=1)
    straight, _ = start(tmp_path / "b", how, every=1)
    assert (again[0].error, list(again[0].losses), checkpoints) == ("", [2, 3, 4, 5], [5, 6])
    assert_same_weights(again, straight)


@pytest.fixture
def alone(one_rank, tmp_path):
    """Starts of a job of one rank, in the test's process."""

    def run(name, *given, **options):
        (tmp_path / name).mkdir(exist_ok=True)
        seen = job(0, tmp_path / name, ALONE, *given, **options)
        checkpoints = sorted(candidates(tmp_path / name / "checkpoints"))
        assert not any(not_finite(tmp_path / name / "checkpoints" / each) for each in checkpoints)
        return seen, [int(each.removeprefix("step-")) for each in checkpoints]

    return run


def assert_same_weights(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for name, p in theirs.weights.items():
            assert torch.equal(ours.weights[name], p), name


@pytest.mark.parametrize(
    ("bad_steps", "saved"),
    [((0,), [2, 4, 6]), ((1,), [3, 4, 6]), ((0, 1, 3, 4), [3, 6]), ((4, 5), [2, 4, 6])],
    ids=["the first", "when a checkpoint is due", "two and two", "the last"],
)
def test_other_steps_train_and_a_checkpoint_waits_for_one(alone, bad_steps, saved):
    seen, checkpoints = alone("job", bad_steps, keep=9)
    assert (seen.error, list(seen.skipped), checkpoints) == ("", list(bad_steps), saved)
    assert all(p.isfinite().all() for p in seen.weights.values())


def test_an_infinite_gradient_under_finite_losses_is_enough_and_any_sample_may_be_it(alone):
    seen, _ = alone("job", spike=(0, 3))
    assert all(math.isfinite(loss) for loss in seen.losses.values())
    names = ", ".join(str(s.sample_index) for s in batch_of(3))
    assert list(seen.skipped) == [3]
    assert seen.skipped[3].endswith(f"gradient norm inf; no update; 6 of 6 samples: {names}")


def test_a_skipped_step_leaves_what_a_job_without_its_batch_would_have(alone, monkeypatch):
    skipped, _ = alone("skipped", [5])
    stopped, _ = alone("stopped", stops_in=4)
    assert stopped.error.startswith("Interrupted: stopped after step 4")
    assert_same_weights([skipped], [stopped])


@pytest.mark.parametrize("ends", [{"ends_at": 4}, {"stops_in": 3}], ids=["killed", "stopped while steps are skipped"])
def test_a_job_resumed_after_a_skipped_step_ends_where_an_undisturbed_one_does(alone, ends):
    straight, _ = alone("straight", [1, 3])
    cut, _ = alone("cut", [1, 3], **ends)
    assert cut.error
    resumed, _ = alone("cut", [1, 3])
    assert 3 in cut.skipped
    assert resumed.error == straight.error == ""
    assert_same_weights([resumed], [straight])


def test_steps_in_a_row_are_counted_across_a_stop(alone, tmp_path):
    stopped, checkpoints = alone("job", [2, 3, 4], stops_in=3)
    assert (stopped.error.startswith("Interrupted"), checkpoints[-1]) == (True, 4)
    assert read_latest(tmp_path / "job" / "checkpoints")["skipped_steps"][1][0] == 3
    resumed, _ = alone("job", [2, 3, 4])
    assert list(resumed.losses) == [4]
    assert "in 3 steps in a row (2, 3, 4)" in resumed.error


def test_a_moment_that_is_not_finite_is_not_saved_either(one_rank, tmp_path):
    (layout,) = ALONE
    it = Rank(0, layout.plan, layout.subject.family, layout.subject.build())
    checkpointer = Checkpointer(tmp_path, it.stages, it.optimizer, it.groups, it.parts, keep=2)
    checkpointer.save(1, {})
    checkpointer.wait()
    name = next(name for name in it.names if name.endswith("norm.weight"))
    it.optimizer.state()[name]["exp_avg_sq"][3] = math.inf
    with pytest.raises(TrainError, match=f"`optimizer/{name}/exp_avg_sq` has values that are not finite after step 1"):
        checkpointer.save(2, {})
    assert candidates(tmp_path) == ["step-00000001"]


def test_a_long_batch_is_listed_in_part():
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(4096)).endswith("62, 63 and 4032 more")


def test_a_row_of_skipped_steps_ends_at_a_finite_one():
    steps = SkippedSteps({})
    for step in range(2 * MAX_SKIPPED):
        steps.add(step, [step])
        if step % MAX_SKIPPED == MAX_SKIPPED - 2:
            assert SkippedSteps(steps.state()).state() == steps.state()
            steps.clear()
        steps.raise_if_too_many()
