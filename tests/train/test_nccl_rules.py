"""Messages of every layout obey NCCL's rules; what breaks them is found. `tests/bench/messages.py` asks the suite."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.parallel.topology import pairs
from dflop.records import LLM
from tests.train import layouts, layouts_context
from tests.train.nccl_rules import Call, broken, communicators, most_pending, stuck
from tests.train.parity import train
from tests.train.ranks import run_ranks
from tests.train.recorded import recorded
from tests.train.synthetic import ALL, family, make_inline_plan, make_plan, make_shapes, make_step_plan, sharing

LAYOUTS = {
    **layouts.LAYOUTS, **layouts.OTHERS, **layouts_context.HEART, **layouts_context.OTHERS,
    **layouts_context.GRID,
}  # fmt: skip
PAIR = make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=1)


def test_every_parity_layout_obeys_them_and_uses_the_connections_that_are_opened():
    for name, layout in LAYOUTS.items():
        trial, found = layout.trial, set()
        for batch, step_plan in zip(trial.subject.batches, trial.step_plans, strict=True):
            calls = recorded(trial.plan, trial.subject.family, batch, step_plan, layout.frozen)
            assert not broken(trial.plan, calls), name
            alone = recorded(trial.plan, trial.subject.family, batch, step_plan, layout.frozen, is_training=False)
            assert not broken(trial.plan, alone), f"{name}, forward passes alone"
            found |= {(min(rank, peer), max(rank, peer)) for rank, of in communicators(calls).items() for _, peer in of}
        assert found <= set(pairs(trial.plan)), name


@st.composite
def plans(draw):
    """Plans of any degrees that the planner may choose from, split or on one grid, encoders apart or not."""
    degree, num_microbatches = st.integers(1, 3), draw(st.integers(2, 6))
    if draw(st.booleans()):
        layout = {name: (1, draw(degree), draw(degree)) for name in ("vision", "audio")}
        layout[LLM] = (draw(degree), draw(degree), draw(degree))
        plan = make_plan(layout, num_microbatches=num_microbatches)
    else:
        pp = draw(st.integers(1, 4))
        stages, begins = [dict() for _ in range(pp)], draw(st.integers(0, pp - 1))
        for name in ("vision", "audio"):
            stages[draw(st.integers(0, begins))][name] = 2
        for stage in range(begins, pp):
            stages[stage][LLM] = 1 if stage > begins else 4 - (pp - 1 - begins)
        stages = [of for of in stages if of]
        apart = draw(st.sampled_from(["", "audio", "vision"])) if LLM in stages[0] else ""
        stages[0].pop(apart, None)
        dp, tp, cp = draw(degree), draw(st.integers(1, 2)), 1 if apart else draw(st.integers(1, 2))
        eps = [ep for ep in (1, 2, 3) if dp * cp % ep == 0]
        plan = make_inline_plan(
            stages, dp=dp, tp=tp, cp=cp, ep=draw(st.sampled_from(eps)) if tp == 1 else 1,
            num_microbatches=num_microbatches, apart={apart: (1, draw(degree), draw(degree))} if apart else {},
        )  # fmt: skip
    return sharing(plan, draw(st.sampled_from([0, ALL])))


@given(
    plans(), st.sets(st.sampled_from(["vision", "audio", LLM]), max_size=2), st.integers(0, 99), st.booleans(),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=120)
def test_so_does_any_plan_with_any_samples(plan, frozen, seed, idle, is_training):
    batch = make_shapes(10, seed=seed)
    step_plan = make_step_plan(plan, batch, seed, idle=idle)
    assert not broken(plan, recorded(plan, family(), batch, step_plan, frozen, is_training=is_training))


def test_ends_that_differ_are_named():
    send, receive = (Call(kind, "forward", peer, (0, 8)) for kind, peer in (("send", 1), ("receive", 0)))
    assert not broken(PAIR, {0: [send], 1: [receive]})
    for calls in ({0: [send], 1: []}, {0: [send], 1: [Call("receive", "forward", 0, (0, 9))]}):
        assert "rank 0 sends [(0, 8)]" in broken(PAIR, calls)[0]


def test_two_that_send_before_they_receive_wait_for_one_another():
    def calls(*kinds):
        """Of two ranks, each of which waits for what it has asked for before it asks for more."""
        return {
            rank: [c for n, k in enumerate(kinds) for c in (Call(k, "forward", 1 - rank), Call("wait", message=2 * n))]
            for rank in range(2)
        }

    assert len(stuck(PAIR, calls("send", "receive"))) > 2
    one, other = calls("send", "receive")[0], calls("receive", "send")[1]
    assert not stuck(PAIR, {0: one, 1: other})


def test_a_second_message_asked_for_ahead_holds_up_what_is_computed_on_a_device_with_one_queue():
    """As the engine did where rows pass through a stage beside hidden states."""
    ahead = [Call("receive", "forward", 0, 0), Call("receive", "forward", 0, 1), Call("compute")]
    calls = {
        0: [Call("receive", "backward", 1, 0), Call("wait", message=0), Call("send", "forward", 1, 0),
            Call("send", "forward", 1, 1)],
        1: [*ahead, Call("send", "backward", 0, 0)],
    }  # fmt: skip
    assert stuck(PAIR, calls)
    assert not stuck(PAIR, calls, num_queues=None)
    calls[1] = [ahead[0], ahead[2], Call("send", "backward", 0, 0), ahead[1]]
    assert not stuck(PAIR, calls)


def test_communicators_and_messages_under_way_are_counted():
    calls = {0: [Call("send", "forward", 1), Call("receive", "backward", 1), Call("wait", message=0)], 1: []}
    assert communicators(calls) == {0: {("forward", 1), ("backward", 1)}, 1: set()}
    assert most_pending(calls) == {0: 2, 1: 0}


def asked(rank, folder, trial):
    """(kind, peer, tag, rows) of every message that a rank of a real run asks for, in order."""
    found = []

    def noting(kind, method):
        def wrapped(tensor, peer, *, group, tag):
            found.append((kind, peer, tag, len(tensor)))
            return method(tensor, peer, group=group, tag=tag)

        return wrapped

    with patch.multiple(dist, isend=noting("send", dist.isend), irecv=noting("receive", dist.irecv)):
        train(rank, folder, trial)
    return found


def test_what_is_recorded_is_what_ranks_ask_for(tmp_path):
    trial = LAYOUTS["inline pp3, rows pass through"].trial
    one = replace(trial, subject=replace(trial.subject, num_steps=1), step_plans=trial.step_plans[:1])
    batch = one.subject.batches[0]
    # The last step of a trial follows its forward passes alone.
    alone, whole = (
        recorded(one.plan, one.subject.family, batch, one.step_plans[0], is_training=is_training)
        for is_training in (False, True)
    )
    for rank, found in enumerate(run_ranks(asked, one.plan.num_processes, tmp_path, one)):
        calls = [*alone[rank], *whole[rank]]
        expected = [(c.kind, c.peer, *c.message) for c in calls if c.kind in ("send", "receive")]
        assert len(expected) >= 4
        assert found == expected
