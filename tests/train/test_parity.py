"""Same mathematics: losses and every gradient equal a single-process Hugging Face run, whatever the layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.reduce import GradientReducer
from dflop.train.stages import llm_stage_of, make_stages
from tests.train import synthetic
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_inline_plan, make_plan, make_shapes, make_step_plan

NUM_STEPS, BATCH_SIZE, NUM_MICROBATCHES, LEARNING_RATE = 3, 10, 4, 0.05
TOLERANCE = 1e-5

IMAGES, MEDIA = ("image", "video"), ("image", "video", "audio")
LAYOUTS = {
    "vision + llm": ({"vision": (1, 1), LLM: (1, 1)}, IMAGES, False),
    "vision dp2 + llm pp2": ({"vision": (1, 2), LLM: (2, 1)}, IMAGES, False),
    "vision dp2 + llm dp2": ({"vision": (1, 2), LLM: (1, 2)}, IMAGES, False),
    "vision pp2 + llm dp2": ({"vision": (2, 1), LLM: (1, 2)}, IMAGES, False),
    "vision dp3 + llm": ({"vision": (1, 3), LLM: (1, 1)}, IMAGES, False),
    "vision + llm pp3": ({"vision": (1, 1), LLM: (3, 1)}, IMAGES, False),
    "vision dp2 + llm tp2": ({"vision": (1, 2), LLM: (1, 1, 2)}, IMAGES, False),
    "vision tp2 + llm dp2": ({"vision": (1, 1, 2), LLM: (1, 2)}, IMAGES, False),
    "vision tp2 + llm pp2": ({"vision": (1, 1, 2), LLM: (2, 1)}, IMAGES, False),
    "vision + audio + llm dp2": ({"vision": (1, 1), "audio": (1, 1), LLM: (1, 2)}, MEDIA, False),
    "vision + audio + llm pp2, tied": ({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, ("image", "audio"), True),
    "inline dp2": (([{"vision": 2, "audio": 2, LLM: 4}], 2), MEDIA, False),
    "inline pp2, mixed stage": (([{"vision": 2, "audio": 1}, {"audio": 1, LLM: 4}], 1), MEDIA, False),
    "inline pp3, rows pass through": (([{"vision": 2}, {"audio": 2}, {LLM: 4}], 1), MEDIA, False),
    "inline pp2 dp2, tied": (([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], 2), MEDIA, True),
}
"""(pp, dp[, tp]) of every module of a split plan, or (layers per stage, dp) of an inline one; media; whether tied."""


def plan_of(layout):
    if isinstance(layout, dict):
        return make_plan(layout, num_microbatches=NUM_MICROBATCHES)
    stages, dp = layout
    return make_inline_plan(stages, dp=dp, num_microbatches=NUM_MICROBATCHES)


def kv_heads_of(layout):
    """As many as tensor-parallel ranks of the LLM can share."""
    return 2 if plan_of(layout).module(LLM).parallel.tp > 1 else 1


def batches(kinds):
    shapes = make_shapes(NUM_STEPS * BATCH_SIZE, seed=3, kinds=kinds)
    return [shapes[i * BATCH_SIZE : (i + 1) * BATCH_SIZE] for i in range(NUM_STEPS)]


def reference(kinds, tied, bad_positions=(), kv_heads=1):
    """Losses, gradient norms and gradients of Hugging Face's own forward and attention, one sample at a time."""
    torch.set_num_threads(1)
    plain = synthetic.plain_model(tied=tied, kv_heads=kv_heads)
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
    plan, kv_heads = plan_of(layout), kv_heads_of(layout)
    seat, family = seat_of(plan, rank), synthetic.family(kv_heads)
    groups = make_groups(plan, rank, timeout_s=60)
    stages, sharded = make_stages(synthetic.tiny_model(tied=tied, kv_heads=kv_heads), family, seat, groups.tensor)
    width = synthetic.HIDDEN_SIZE
    engine = Engine(plan, seat, stages, groups, torch.device("cpu"), hidden_size=width, row_width=width)
    reducer = GradientReducer(plan, seat, stages, groups, sharded)
    names = {n: p for stage in stages for n, p in stage.names.items()}
    steps = []
    for step, batch in enumerate(batches(kinds)):
        feed = Feed(SyntheticSource(batch), family, plan, seat, llm_stage_of(stages))
        prepared = feed.prepare(make_step_plan(plan, batch, step))
        healthy = torch.tensor([p not in bad_positions for p in range(len(batch))])
        tokens = sum(s.num_supervised_tokens for s, good in zip(batch, healthy, strict=True) if good)
        trace = engine.run(prepared.microbatches, healthy=healthy, num_loss_tokens=tokens)
        reducer.reduce()
        norm, loss = reducer.norm_and_loss(trace.loss)
        steps.append((loss, norm, {n: _whole(n, p, sharded, groups) for n, p in names.items()}))
        with torch.no_grad():
            for p in names.values():
                p -= LEARNING_RATE * p.grad
                p.grad = None
    return steps


def _whole(name, parameter, sharded, groups):
    """A gradient, put together from the parts that tensor-parallel ranks hold."""
    if name not in sharded:
        return parameter.grad.clone()
    parts = [torch.empty(0)] * groups.tensor.size()
    dist.all_gather_object(parts, parameter.grad, group=groups.tensor)
    return parts


def run_layout(layout, kinds, tied, bad_positions, folder):
    return run_ranks(worker, plan_of(layout).num_processes, folder, layout, kinds, tied, bad_positions)


def assert_equal_steps(ranks, expected):
    for step, (loss, norm, gradients) in enumerate(expected):
        for rank in ranks:
            assert rank[step][0] == pytest.approx(loss, rel=TOLERANCE), f"loss of step {step}"
            assert rank[step][1] == pytest.approx(norm, rel=TOLERANCE), f"gradient norm of step {step}"
            for name, got in rank[step][2].items():
                want = gradients[name] if name in gradients else torch.zeros_like(got)
                got = joined(got, want) if isinstance(got, list) else got
                error = float((got - want).abs().max())
                # A parameter nothing depends on (an unused embedding) has gradient zero on both sides.
                assert error <= TOLERANCE * max(float(want.abs().max()), 1e-12), (
                    f"step {step}: {name} off by {error:.2e}"
                )
        covered = {name for rank in ranks for name in rank[step][2]}
        assert set(gradients) <= covered, "a parameter with a gradient is held by no rank"


def joined(parts, want):
    """Parts of a matrix along the axis along which they are parts; a fused one holds several matrices."""
    (axis,) = [d for d in range(want.dim()) if parts[0].shape[d] != want.shape[d]]
    whole = torch.cat(parts, dim=axis)
    if torch.allclose(whole, want, atol=TOLERANCE * float(want.abs().max())):
        return whole
    return torch.cat([torch.cat([p.chunk(3, axis)[i] for p in parts], axis) for i in range(3)], axis)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_hugging_face(name, tmp_path):
    layout, kinds, tied = LAYOUTS[name]
    ranks = run_layout(layout, kinds, tied, (), tmp_path)
    assert_equal_steps(ranks, reference(kinds, tied, kv_heads=kv_heads_of(layout)))


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
