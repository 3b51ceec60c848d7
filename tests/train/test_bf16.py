"""In bfloat16 the engine is as near to the truth, which is float32 with the same weights, as plain Hugging Face is.

Plain Hugging Face runs one sample at a time in one process; the engine packs samples, cuts the model, sends rows and
gradients in bfloat16, and adds the gradients of microbatches and replicas in it.
"""

from __future__ import annotations

import copy

import pytest
import torch

from dflop.models.build import build_model
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM
from dflop.train.engine import Engine
from dflop.train.feed import Feed
from dflop.train.reduce import GradientReducer
from dflop.train.stages import llm_stage_of, make_stages
from tests.train import synthetic
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_inline_plan, make_plan, make_shapes, make_step_plan

NUM_STEPS, BATCH_SIZE = 4, 8
PLANS = {
    "split": make_plan({"vision": (1, 1), "audio": (1, 1), LLM: (1, 2)}, num_microbatches=3),
    "inline": make_inline_plan([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], dp=2, num_microbatches=2),
}


def build():
    return build_model(synthetic.family(), synthetic.hf_config(), seed=0, dtype=torch.bfloat16)


def plain(dtype):
    """The same weights with Hugging Face's own attention."""
    model = build()
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa", dtype=dtype)
    other.load_state_dict(model.state_dict())
    return other


def batches():
    shapes = make_shapes(NUM_STEPS * BATCH_SIZE, seed=11)
    return [shapes[i : i + BATCH_SIZE] for i in range(0, len(shapes), BATCH_SIZE)]


def run_plain(dtype):
    """(loss, gradients by name) of every batch."""
    model, steps = plain(dtype), []
    for batch in batches():
        source, tokens = SyntheticSource(batch), sum(s.num_supervised_tokens for s in batch)
        loss = 0.0
        for shape in batch:
            sample = source.tokens(shape.sample_index)
            inputs = {
                k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() and "second" not in k else v
                for k, v in synthetic.hf_inputs(source, shape, sample).items()
            }
            logits = model(**inputs).logits[0, :-1].float()
            labels = torch.from_numpy(sample.labels[1:])
            share = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / tokens
            share.backward()
            loss += float(share.detach())
        steps.append((loss, {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad(set_to_none=True)
    return steps


def run_engine(rank, folder, name):
    plan, family = PLANS[name], synthetic.family()
    seat = seat_of(plan, rank)
    groups = make_groups(plan, rank, timeout_s=60)
    stages, sharded = make_stages(build(), family, seat, groups.tensor)
    width = synthetic.HIDDEN_SIZE
    engine = Engine(plan, seat, stages, groups, torch.device("cpu"), hidden_size=width, row_width=width)
    reducer, steps = GradientReducer(plan, seat, stages, groups, sharded), []
    for step, batch in enumerate(batches()):
        feed = Feed(SyntheticSource(batch), family, plan, seat, llm_stage_of(stages), dtype=torch.bfloat16)
        prepared = feed.prepare(make_step_plan(plan, batch, step))
        given = [e.data for m in prepared.microbatches if m for e in m.encoders.values() if e.data is not None]
        assert all(data.dtype == torch.bfloat16 for data in given)
        tokens = sum(s.num_supervised_tokens for s in batch)
        healthy = torch.ones(len(batch), dtype=torch.bool)
        trace = engine.run(prepared.microbatches, healthy=healthy, num_loss_tokens=tokens)
        reducer.reduce()
        _, loss, _ = reducer.totals(trace.loss)
        names = {n: p for stage in stages for n, p in stage.names.items()}
        assert all(p.dtype == torch.bfloat16 for p in names.values())
        steps.append((loss, {n: p.grad.double() for n, p in names.items() if p.grad is not None}))
        for p in names.values():
            p.grad = None
    return steps


@pytest.fixture(scope="module")
def truth():
    return run_plain(torch.float32)


@pytest.fixture(scope="module")
def rounded():
    return run_plain(torch.bfloat16)


def loss_error(steps, truth):
    """Root mean square over the steps."""
    return (sum((a[0] - b[0]) ** 2 for a, b in zip(steps, truth, strict=True)) / len(truth)) ** 0.5


def gradient_error(steps, truth):
    """Norm of what all gradients of all steps are off by, relative to their own."""
    off = of = 0.0
    for (_, got), (_, want) in zip(steps, truth, strict=True):
        for name, exact in want.items():
            off += float((got[name] - exact).square().sum()) if name in got else float(exact.square().sum())
            of += float(exact.square().sum())
    return (off / of) ** 0.5


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_as_near_to_float32_as_plain_bfloat16_is(tmp_path, truth, rounded, name):
    ranks = run_ranks(run_engine, PLANS[name].num_processes, tmp_path, name)
    losses = {tuple(loss for loss, _ in steps) for steps in ranks}
    assert len(losses) == 1, "every rank knows the same loss"
    engine = [
        (step[0][0], {n: g for _, gradients in step for n, g in gradients.items()}) for step in zip(*ranks, strict=True)
    ]
    assert 0 < loss_error(engine, truth) <= 1.5 * loss_error(rounded, truth)
    assert 0 < gradient_error(engine, truth) <= 1.5 * gradient_error(rounded, truth)
