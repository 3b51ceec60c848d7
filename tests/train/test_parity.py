"""Same mathematics: losses and every gradient equal a single-process Hugging Face run, whatever the layout."""

from __future__ import annotations

import pytest
import torch

from dflop.models.build import cut_stage
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.reduce import GradientReducer
from tests.train import synthetic
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_plan, make_shapes, make_step_plan

NUM_STEPS, BATCH_SIZE, NUM_MICROBATCHES, LEARNING_RATE = 3, 10, 4, 0.05
TOLERANCE = 1e-5

LAYOUTS = {
    "vision dp2 + llm pp2": ({"vision": (1, 2), LLM: (2, 1)}, ("image", "video"), False),
    "vision dp2 + llm dp2": ({"vision": (1, 2), LLM: (1, 2)}, ("image", "video"), False),
    "vision + audio + llm dp2": ({"vision": (1, 1), "audio": (1, 1), LLM: (1, 2)}, ("image", "video", "audio"), False),
    "vision + audio + llm pp2, tied": ({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, ("image", "audio"), True),
}


def batches(kinds):
    shapes = make_shapes(NUM_STEPS * BATCH_SIZE, seed=3, kinds=kinds)
    return [shapes[i * BATCH_SIZE : (i + 1) * BATCH_SIZE] for i in range(NUM_STEPS)]


def reference(kinds, tied, bad_positions=()):
    """Losses, gradient norms and gradients of Hugging Face's own forward and attention, one sample at a time."""
    torch.set_num_threads(1)
    plain = synthetic.plain_model(tied=tied)
    steps = []
    for batch in batches(kinds):
        source = SyntheticSource(batch)
        kept = [s for p, s in enumerate(batch) if p not in bad_positions]
        denominator, loss = sum(s.num_supervised_tokens for s in kept), 0.0
        for shape in kept:
            part = synthetic.loss_sum(plain, source, shape)
            (part / denominator).backward()
            loss += float(part.detach()) / denominator
        gradients = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        steps.append((loss, norm, gradients))
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p -= LEARNING_RATE * p.grad
                    p.grad = None
    return steps


def worker(rank, folder, layout, kinds, tied, bad_positions):
    plan = make_plan(layout, num_microbatches=NUM_MICROBATCHES)
    seat = seat_of(plan, rank)
    stage = cut_stage(synthetic.tiny_model(tied=tied), synthetic.family(), seat.module, seat.layers)
    groups = make_groups(plan, rank, timeout_s=60)
    engine = Engine(plan, seat, stage, groups, torch.device("cpu"), synthetic.HIDDEN_SIZE)
    reducer = GradientReducer(plan, seat, stage, groups)
    steps = []
    for step, batch in enumerate(batches(kinds)):
        feed = Feed(SyntheticSource(batch), synthetic.family(), plan, seat, stage if seat.module == LLM else None)
        prepared = feed.prepare(make_step_plan(plan, batch, step))
        healthy = torch.tensor([p not in bad_positions for p in range(len(batch))])
        tokens = sum(s.num_supervised_tokens for s, good in zip(batch, healthy, strict=True) if good)
        trace = engine.run(prepared.microbatches, healthy=healthy, num_loss_tokens=tokens)
        reducer.reduce()
        norm, loss = reducer.norm_and_loss(trace.loss)
        steps.append((loss, norm, {n: p.grad.clone() for n, p in stage.names.items()}))
        with torch.no_grad():
            for p in stage.names.values():
                p -= LEARNING_RATE * p.grad
                p.grad = None
    return steps


def run_layout(layout, kinds, tied, bad_positions, folder):
    num_ranks = sum(pp * dp for pp, dp in layout.values())
    return run_ranks(worker, num_ranks, folder, layout, kinds, tied, bad_positions)


def assert_equal_steps(ranks, expected):
    for step, (loss, norm, gradients) in enumerate(expected):
        for rank in ranks:
            assert rank[step][0] == pytest.approx(loss, rel=TOLERANCE), f"loss of step {step}"
            assert rank[step][1] == pytest.approx(norm, rel=TOLERANCE), f"gradient norm of step {step}"
            for name, got in rank[step][2].items():
                want = gradients.get(name, torch.zeros_like(got))
                error = float((got - want).abs().max())
                # A parameter nothing depends on (an unused embedding) has gradient zero on both sides.
                assert error <= TOLERANCE * max(float(want.abs().max()), 1e-12), (
                    f"step {step}: {name} off by {error:.2e}"
                )
        covered = {name for rank in ranks for name in rank[step][2]}
        assert set(gradients) <= covered, "a parameter with a gradient is held by no rank"


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_hugging_face(name, tmp_path):
    layout, kinds, tied = LAYOUTS[name]
    ranks = run_layout(layout, kinds, tied, (), tmp_path)
    assert_equal_steps(ranks, reference(kinds, tied))


def test_bad_sample_changes_nobody_elses_gradient(tmp_path):
    kinds, bad = ("image", "video"), (1, 4)
    ranks = run_layout({"vision": (1, 1), LLM: (1, 1)}, kinds, False, bad, tmp_path)
    assert_equal_steps(ranks, reference(kinds, False, bad))


def test_the_steps_are_as_uneven_as_claimed():
    plan = make_plan({"vision": (1, 2), LLM: (1, 2)}, num_microbatches=NUM_MICROBATCHES)
    for step, batch in enumerate(batches(("image", "video"))):
        step_plan = make_step_plan(plan, batch, step)
        vision, llm = step_plan.of("vision"), step_plan.of(LLM)
        assert not any(vision.owner[0]), "slot 0 has media"
        assert any(llm.owner[0])
        tokens = [sum(llm.item_rows[i] for ids in slot for i in ids) for slot in llm.owner]
        assert len(set(tokens)) == len(tokens)
