from __future__ import annotations

import dataclasses
import math
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflop.errors import Interrupted
from dflop.records import LLM
from dflop.train.checkpoint import Checkpointer
from dflop.train.liveness import Activities
from dflop.train.loop import Hooks
from dflop.train.manifest import read_latest
from dflop.train.plan_source import PlanMessage
from dflop.train.prefetch import MediaError
from tests.train import synthetic
from tests.train.rank import Rank, loop_settings, weights_come_late
from tests.train.ranks import run_ranks
from tests.train.synthetic import (
    SyntheticSource,
    family,
    make_plan,
    make_shapes,
    make_step_plan,
    sharing_optimizer,
    tiny_model,
)

SETTINGS = loop_settings("run", 4, 0.01, attempt=1, warmup_steps=2, checkpoint_every=2)
BATCH_SIZE = 6


class FixedPlans:
    """The plan of step t trains samples t * BATCH_SIZE onwards; step `ends_at` never comes."""

    def __init__(self, plan, shapes, ends_at):
        self._plan, self._shapes, self._ends_at = plan, shapes, ends_at

    def get(self, step):
        if step == self._ends_at:
            raise ConnectionError("the job was killed")
        batch = self._shapes[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        step_plan = make_step_plan(self._plan, batch, step, text_only_slot=False)
        module = self._plan.modules[0].module
        predicted = {(module, 0, 0): [(k, 1, 2, 3 + k, 0.25, 0.75) for k in range(3)]}
        return PlanMessage.of(dataclasses.replace(step_plan, predicted_step_s=0.5), predicted)


def make_trainer(rank, layout, shapes, source, settings=SETTINGS, *, folder=None, ends_at=None, kv_heads=1, **hooks):
    """(trainer, stage, (observations, bad samples) that its hooks receive)."""
    plan = sharing_optimizer(make_plan(layout, num_microbatches=3), *layout)
    it = Rank(rank, plan, family(kv_heads), tiny_model(kv_heads=kv_heads), weight_decay=0.01)
    seen, bad = [], []
    checkpointer = Checkpointer(folder, it.stages, it.optimizer, it.groups, {}, keep=2) if folder else None
    trainer = it.trainer(
        settings, source, FixedPlans(plan, shapes, ends_at),
        Hooks(seen.append, lambda *event: bad.append(event), **hooks), checkpointer=checkpointer,
    )  # fmt: skip
    return trainer, it.stages[0], (seen, bad)


def text_shapes(num_steps):
    shapes = [s for s in make_shapes(200, seed=0, kinds=("image",)) if not s.items]
    return shapes[: num_steps * BATCH_SIZE]


def test_a_resumed_job_ends_where_an_uninterrupted_one_does(one_rank, tmp_path):
    shapes = text_shapes(SETTINGS.num_steps)
    source = SyntheticSource(shapes)

    def trainer_in(name, **options):
        return make_trainer(0, {LLM: (1, 1)}, shapes, source, folder=tmp_path / name, **options)

    trainer, straight, (all_seen, _) = trainer_in("straight")
    assert trainer.run() == 0
    trainer, _, (first_seen, _) = trainer_in("cut", ends_at=2)
    with pytest.raises(ConnectionError, match="killed"):
        trainer.run()
    trainer.checkpointer.close()  # the write that was under way
    trainer, resumed, (rest_seen, _) = trainer_in("cut")
    assert trainer.run() == 2
    assert [o.step for o in first_seen + rest_seen] == [0, 1, 2, 3]
    assert [o.loss for o in first_seen + rest_seen] == [o.loss for o in all_seen]
    for name, p in straight.names.items():
        assert torch.equal(p, resumed.names[name]), name
    trainer, _, (seen, _) = trainer_in("cut")
    assert (trainer.run(), seen) == (SETTINGS.num_steps, []), "a finished job trains nothing more"


@pytest.mark.parametrize(("every_s", "expected"), [(1e-9, [1, 2]), (0.0, [2]), (1e9, [2])])
def test_a_checkpoint_may_be_due_by_the_clock(one_rank, tmp_path, every_s, expected):
    shapes, saved = text_shapes(2), []
    settings = loop_settings("run", 2, 0.01, checkpoint_every=100, checkpoint_every_s=every_s)
    trainer, _, (seen, _) = make_trainer(
        0, {LLM: (1, 1)}, shapes, SyntheticSource(shapes), settings, folder=tmp_path,
        before_checkpoint=lambda: saved.append(len(seen)) or {},
    )  # fmt: skip
    trainer.run()
    assert saved == expected


def test_a_job_told_to_stop_has_a_checkpoint_on_disk_when_it_does(one_rank, tmp_path):
    shapes = text_shapes(SETTINGS.num_steps)
    answers = iter([False, False, False, True])  # before the first step, and in each
    trainer, _, (seen, _) = make_trainer(
        0, {LLM: (1, 1)}, shapes, SyntheticSource(shapes), folder=tmp_path, is_told_to_stop=lambda: next(answers),
        before_checkpoint=lambda: {"learned": 5},
    )  # fmt: skip
    with pytest.raises(Interrupted, match="stopped after step 2, 3 of 4 steps done"):
        trainer.run()
    assert [o.step for o in seen] == [0, 1, 2]
    latest = read_latest(tmp_path)
    assert (latest["next_step"], latest["learned"]) == (3, 5)


def stop_rank_1_in_step_1(rank, folder):
    shapes, asked = text_shapes(SETTINGS.num_steps), []

    def is_told():
        asked.append(rank)
        return rank == 1 and len(asked) == 3  # before the first step, in step 0, in step 1

    source = SyntheticSource(shapes)
    trainer, stage, (seen, _) = make_trainer(rank, {LLM: (1, 2)}, shapes, source, is_told_to_stop=is_told)
    missing = weights_come_late()
    with pytest.raises(Interrupted):
        trainer.run()
    assert not missing
    return [o.step for o in seen], {n: p.detach() for n, p in stage.names.items()}


def test_all_ranks_stop_behind_the_step_in_which_one_is_told_to_with_the_same_weights(tmp_path):
    (steps, weights), (others, same) = run_ranks(stop_rank_1_in_step_1, 2, tmp_path)
    assert steps == others == [0, 1]
    assert all(torch.equal(p, same[n]) for n, p in weights.items())


def numbers_drawn(rank, folder, seed, layout, first):
    """What each library draws in steps of a job that resumes at the first of them."""
    drawn, shapes = [], text_shapes(SETTINGS.num_steps)
    settings = loop_settings("run", SETTINGS.num_steps, 0.01, seed=seed)

    def draw(_):
        drawn.append((float(torch.rand(1)), np.random.rand(), random.random()))  # noqa: NPY002, what libraries draw from

    trainer = make_trainer(rank, layout, shapes, SyntheticSource(shapes), settings, kv_heads=2)[0]
    trainer.hooks = dataclasses.replace(trainer.hooks, on_observation=draw)

    def nothing(*_: object) -> None:
        """In place of saving and of waiting for it."""

    trainer.checkpointer = SimpleNamespace(load_latest=lambda: {"next_step": first}, save=nothing, wait=nothing)
    torch.manual_seed(rank)
    trainer.run()
    return drawn[: SETTINGS.num_steps - first]


def test_what_a_step_draws_follows_from_seed_step_and_tensor_parallel_group(tmp_path):
    one, other = run_ranks(numbers_drawn, 2, tmp_path, 3, {LLM: (1, 2)}, 0)
    assert len({number for step in (*one, *other) for number in step}) == 2 * 3 * SETTINGS.num_steps
    assert run_ranks(numbers_drawn, 2, tmp_path, 3, {LLM: (1, 1, 2)}, 2) == [one[2:], one[2:]]
    assert not set(run_ranks(numbers_drawn, 2, tmp_path, 4, {LLM: (1, 2)}, 0)[0]) & set(one)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:4711"), True),
        (RuntimeError("NCCL error: ncclRemoteError: remote process exited"), True),
        (OSError("no such file"), False),
    ],
)
def test_a_lost_peer_is_noted_by_the_feed_thread_while_the_main_thread_waits_for_its_device(
    one_rank, monkeypatch, error, is_lost
):
    shapes, failed = text_shapes(2), threading.Event()
    trainer, _, _ = make_trainer(0, {LLM: (1, 1)}, shapes, SyntheticSource(shapes))
    get, seen = trainer.plans.get, []

    def lose_peer(step):
        if step == 1:
            raise error
        return get(step)

    def wait_for_device(*_args, **_options):
        assert failed.wait(60)
        seen.append(trainer.activities.has_lost_peer)
        raise Interrupted("the device is free")

    class Noting(Activities):
        def note(self, error):
            found = super().note(error)
            failed.set()
            return found

    trainer.activities = Noting()
    monkeypatch.setattr(trainer.plans, "get", lose_peer)
    monkeypatch.setattr(trainer.engine, "run", wait_for_device)
    with pytest.raises(Interrupted):
        trainer.run()
    assert seen == [is_lost]


def test_observations_say_what_was_planned_and_what_happened(one_rank):
    shapes = text_shapes(2)
    settings = dataclasses.replace(SETTINGS, num_steps=2)
    trainer, _, (seen, bad) = make_trainer(0, {LLM: (1, 1)}, shapes, SyntheticSource(shapes), settings)
    trainer.run()
    assert bad == []
    for step, o in enumerate(seen):
        assert (o.run_id, o.attempt, o.step, o.policy, o.rank, o.module) == ("run", 1, step, "random", 0, LLM)
        batch = shapes[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        assert o.num_supervised_tokens == sum(s.num_supervised_tokens for s in batch)
        assert o.predicted_step_s == 0.5
        assert o.spans
        for span in o.spans:
            assert (span.num_items, span.num_tokens, span.sum_sq_tokens) == (1, 2, 3 + span.microbatch)
            assert (span.predicted_forward_s, span.predicted_backward_s) == (0.25, 0.75)
        assert 0 < o.busy_s <= o.step_s
        assert o.busy_s == pytest.approx(sum(s.forward_s + s.backward_s for s in o.spans))
        assert all(min(s.forward_compute_s, s.backward_compute_s) > 0 for s in o.spans)
        assert o.reduce_s + o.optimizer_s <= o.step_s
        assert o.grad_norm > 0
    assert len(seen) == 2


class BrokenSource(SyntheticSource):
    """One image of the second step cannot be decoded."""

    def __init__(self, shapes, broken):
        super().__init__(shapes)
        self._broken = broken

    def array(self, sample_index: int, item: int) -> np.ndarray:
        if (sample_index, item) == self._broken:
            raise MediaError("file is truncated")
        return super().array(sample_index, item)


def test_a_step_whose_samples_were_all_lost_has_no_loss(one_rank, monkeypatch):
    shapes, settings = text_shapes(3), dataclasses.replace(SETTINGS, num_steps=3)
    trainer, _, (seen, _) = make_trainer(0, {LLM: (1, 1)}, shapes, SyntheticSource(shapes), settings)
    monkeypatch.setattr(
        trainer, "_agree_on_health", lambda step, prepared: torch.full((BATCH_SIZE,), step != 1, dtype=torch.bool)
    )
    trainer.run()
    assert [o.num_supervised_tokens > 0 for o in seen] == [True, False, True]
    assert [math.isnan(o.loss) for o in seen] == [False, True, False]
    assert seen[1].grad_norm == 0


def train_with_a_broken_image(rank, folder, broken):
    shapes = make_shapes(2 * BATCH_SIZE, seed=4, kinds=("image",))
    settings = dataclasses.replace(SETTINGS, num_steps=2, learning_rate=1e-12)
    layout = {"vision": (1, 1), LLM: (1, 1)}
    trainer, _, told = make_trainer(rank, layout, shapes, BrokenSource(shapes, broken), settings)
    trainer.run()
    return told


def test_a_broken_image_takes_its_sample_out_of_loss_and_denominator_and_nothing_else(tmp_path):
    shapes = make_shapes(2 * BATCH_SIZE, seed=4, kinds=("image",))
    broken = next(s.sample_index for s in shapes[BATCH_SIZE:] if s.items)
    ranks = run_ranks(train_with_a_broken_image, 2, tmp_path, (broken, 0))
    assert [bad for _, bad in ranks] == [[(1, broken, "image.bin", "file is truncated")], []]
    source, plain = SyntheticSource(shapes), synthetic.plain_model()
    for step in (0, 1):
        batch = shapes[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        kept = [s for s in batch if s.sample_index != broken]
        tokens = sum(s.num_supervised_tokens for s in kept)
        with torch.no_grad():
            loss = sum(float(synthetic.loss_sum(plain, source, s)) for s in kept) / tokens
        for seen, _ in ranks:
            assert seen[step].num_supervised_tokens == tokens
            assert seen[step].loss == pytest.approx(loss, rel=1e-5)
