"""One rank alone: errors and bookkeeping. The mathematics over several ranks is test_parity's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflop.errors import TrainError
from dflop.records import LLM
from tests.train import synthetic
from tests.train.rank import Rank
from tests.train.synthetic import (
    SyntheticSource,
    family,
    make_inline_plan,
    make_plan,
    make_shapes,
    make_step_plan,
    tiny_model,
)


def prepare(rank, layout, kinds, num_microbatches=3):
    """(engine, stage, samples, prepared step) of one rank; it may run as long as it needs no peer."""
    plan = make_plan(layout, num_microbatches=num_microbatches)
    it = Rank(rank, plan, family(), tiny_model(), is_alone=True)
    shapes = [s for s in make_shapes(20, seed=5, kinds=kinds or ("image",)) if bool(s.items) == bool(kinds)][:6]
    step = it.prepare(SyntheticSource(shapes), make_step_plan(plan, shapes, 0, text_only_slot=False))
    return it.engine, it.stages[0], shapes, step


def first_microbatch(step):
    return next(k for k, given in enumerate(step.microbatches) if given is not None)


def test_rows_that_differ_from_the_plan_stop_the_step_and_are_located():
    engine, stage, _, step = prepare(1, {"audio": (1, 1), "vision": (1, 1), LLM: (1, 1)}, ("image",))
    forward = stage.forward
    stage.forward = lambda *given: forward(*given)[:-1]
    with pytest.raises(TrainError, match=r"`vision` produced \d+ rows, the plan expects \d+") as caught:
        engine.run(step.microbatches, num_loss_tokens=1)
    k = first_microbatch(step)
    assert caught.value.where == f"rank 1 (vision stage 0 replica 0), forward of microbatch {k}"
    assert "disagree" in caught.value.hint


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_any_error_is_located(phase):
    engine, stage, _, step = prepare(0, {LLM: (1, 1)}, ())
    if phase == "forward":
        stage.forward = lambda *_: 1 / 0
    else:
        stage.loss = lambda hidden, *_: hidden.detach().sum()
    with pytest.raises(TrainError) as caught:
        engine.run(step.microbatches, num_loss_tokens=1)
    k = first_microbatch(step)
    assert caught.value.where == f"rank 0 (llm stage 0 replica 0), {phase} of microbatch {k}"
    assert caught.value.what.startswith("ZeroDivisionError: " if phase == "forward" else "RuntimeError: ")


def test_a_step_is_timed_where_there_was_work_and_its_loss_is_the_global_share():
    engine, stage, shapes, step = prepare(0, {LLM: (1, 1)}, (), num_microbatches=9)
    healthy = torch.tensor([True, False, True, True, True, True])
    tokens = 1000
    trace = engine.run([given and given.masked(healthy) for given in step.microbatches], num_loss_tokens=tokens)
    busy = {k for k, given in enumerate(step.microbatches) if given is not None}
    assert set(trace.timings) == busy != set(range(9))
    assert trace.busy_s == pytest.approx(sum(t["forward_s"] + t["backward_s"] for t in trace.timings.values()))
    assert all(t["backward_start_s"] >= t["forward_start_s"] + t["forward_s"] for t in trace.timings.values())
    plain, source, expected = synthetic.plain_model(), SyntheticSource(shapes), 0.0
    for shape, good in zip(shapes, healthy.tolist(), strict=True):
        if good:
            expected += float(synthetic.loss_sum(plain, source, shape).detach())
    assert trace.loss == pytest.approx(expected / tokens, rel=1e-5)
    assert stage.names["lm_head.weight"].grad is not None


def test_what_an_action_receives_is_asked_for_while_the_one_before_it_computes():
    engine, _, _, step = prepare(1, {LLM: (2, 1)}, (), num_microbatches=4)
    seen = []
    engine._activity = SimpleNamespace(works=seen.append, waits=lambda _: None)
    engine._post = lambda shape, way, is_forward: seen.append(f"asks for microbatch {way.tag}")
    engine._receive = lambda shape, way, is_forward: torch.zeros(shape)
    engine._send = lambda *_, **__: None
    engine.run(step.microbatches, num_loss_tokens=1)
    first, *later = (k for k, given in enumerate(step.microbatches) if given is not None)
    expected = [f"forward of microbatch {first}"]
    for k, after in zip([first, *later], later, strict=False):
        expected += [f"asks for microbatch {after}", f"backward of microbatch {k}", f"forward of microbatch {after}"]
    assert seen == [*expected, f"backward of microbatch {later[-1]}"]


def test_waiting_for_messages_is_not_busy(monkeypatch):
    """The clock runs while a message is awaited, and at no other time."""
    now_s = 0.0

    def late(receive):
        def received(*args):
            nonlocal now_s
            now_s += 1.0
            return receive(*args)

        return received

    clock = SimpleNamespace(perf_counter=lambda: now_s, thread_time=lambda: now_s)
    monkeypatch.setattr("dflop.train.step_trace.time", clock)
    engine, _, _, step = prepare(0, {LLM: (1, 1)}, ())
    for name in ("_carry_ways", "_row_ways", "_receive_gradient"):
        monkeypatch.setattr(engine, name, late(getattr(engine, name)))
    trace = engine.run(step.microbatches, num_loss_tokens=1)
    assert trace.busy_s == 0
    assert sum(span.duration_s for span in trace.spans(0.0) if span.name == "receive_wait") == now_s > 0


@pytest.mark.parametrize("bad", [(), (1,), (0, 1, 2, 3, 4, 5)], ids=["all healthy", "one bad", "all bad"])
def test_whatever_is_copied_to_the_device_lies_in_page_locked_memory(monkeypatch, bad):
    """From other memory the host waits for a copy, and what the device has queued before it."""
    locked, copied, zeros = [], [], torch.zeros

    def lock(tensor):
        locked.append(tensor.clone())
        return locked[-1]

    def zeros_locked(*args, pin_memory=False, **options):
        return lock(zeros(*args, **options)) if pin_memory else zeros(*args, **options)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    monkeypatch.setattr(torch, "zeros", zeros_locked)
    plan = make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=3)
    it, shapes = Rank(0, plan, family(), tiny_model(), is_alone=True), make_shapes(6, seed=5)
    feed = it.feed(SyntheticSource(shapes), pins=True)
    healthy = torch.tensor([position not in bad for position in range(6)])
    step = feed.masked(feed.prepare(make_step_plan(plan, shapes, 0)), healthy)
    monkeypatch.setattr(it.engine, "_here", lambda tensor: copied.append(tensor) or tensor)
    it.engine.run(step.microbatches, num_loss_tokens=100)
    assert len(copied) > 12
    assert not [tensor for tensor in copied if not any(tensor is one for one in locked)]
