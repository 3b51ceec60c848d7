"""Tensor parallelism changes nothing but where numbers lie: outputs, losses, gradients, counted exchanges, refusals."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dflop.errors import ConfigError
from dflop.models.splits import split_of
from dflop.models.ways import Way, apply_way
from dflop.parallel import tokens
from dflop.parallel.tensor import shard_stage, vocab_share
from dflop.records import LLM
from tests.parallel.stacks import STACKS, decoder, encoder
from tests.train.ranks import run_ranks

TOLERANCE = 1e-5
NUM_MICROBATCHES = 2
ALL = [(name, 2) for name in STACKS] + [(n, 4) for n in ("Llama", "Qwen3", "Qwen3 tied", "Qwen2.5-VL vision")]
QUICK = {
    ("Llama", 2), ("Qwen3", 2), ("Qwen3 tied", 2), ("Qwen2.5-VL vision", 4), ("SigLIP", 2), ("InternVL", 2),
    ("Qwen3-VL vision", 2), ("Qwen2-Audio", 2), ("Omni vision", 2),
    ("SigLIP, inner states", 2),
}  # fmt: skip
"""Every way of cutting a layer once; the others are in a lane."""
each_case = pytest.mark.parametrize(
    ("name", "degree"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.lane("layouts")) for c in ALL]
)


def train(stack, stage):
    """Output and loss of the last of several microbatches, and the gradients they add up to."""
    for _ in range(NUM_MICROBATCHES):
        out = stack.forward(stage)
        loss = stack.loss(stage, out)
        loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in stage.names.items()}
    return out.detach(), loss.detach(), gradients


def worker(rank, _folder, name, recompute):
    stack, num_sent = STACKS[name], 0
    stage = stack.build()
    parts = shard_stage(stage, dist.group.WORLD)
    if recompute:
        apply_way(stage, Way(recompute=True))

    def counted(send):
        def count(*args, **kwargs):
            nonlocal num_sent
            num_sent += 1
            return send(*args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for place, send in ((dist, "all_reduce"), (tokens, "_all_gather"), (tokens, "_reduce_scatter")):
            patch.setattr(place, send, counted(getattr(place, send)))
        out, loss, gradients = train(stack, stage)
    for partial in stage.partial:
        dist.all_reduce(gradients[partial])
    assert {id(p) for p in stage.parameters()} == {id(p) for p in stage.names.values()}
    return SimpleNamespace(
        out=out, loss=loss, gradients=gradients, parts=frozenset(parts), num_sent=num_sent,
        param_bytes=stage.param_bytes, values={n: p.detach() for n, p in stage.names.items()},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    @cache
    def ranks_of(name, degree, recompute=False):
        return run_ranks(worker, degree, tmp_path_factory.mktemp("ranks"), name, recompute)

    return ranks_of


def part_of(whole, name, split, rank, degree):
    """This rank's part of a parameter, by its name alone: what the cutting has to give."""
    linear, _, kind = name.rpartition(".")
    if linear.endswith(("lm_head", "embed_tokens")):
        return whole[slice(*vocab_share(len(whole), rank, degree))]
    column = [c for c in split.column if linear.endswith(f".{c}")]
    if column:
        matrices = whole.chunk(split.fused.get(column[0], 1))
        return torch.cat([m[len(m) // degree * rank : len(m) // degree * (rank + 1)] for m in matrices])
    if kind == "weight" and any(linear.endswith(f".{r}") for r in split.row):
        width = whole.shape[1] // degree
        return whole[:, width * rank : width * (rank + 1)]
    return whole


def assert_close(got, want, what, scale=0.0):
    error = float((got - want).abs().max())
    assert got.shape == want.shape, what
    assert error <= TOLERANCE * max(float(want.abs().max()), scale, 1e-12), f"{what} off by {error:.2e}"


def rounding_scale(name, gradients):
    """Size of the terms of a gradient that cancel: a bias of keys moves all scores of a query alike, without rope."""
    weight = gradients.get(name.removesuffix("bias") + "weight", gradients[name]).abs().max()
    return float(weight) if gradients[name].abs().max() < TOLERANCE * weight else 0.0


@each_case
def test_output_loss_and_every_gradient_equal_one_process(run, name, degree):
    assert_parity(run(name, degree), name, degree)


@pytest.mark.parametrize("name", ["Qwen3", "Omni vision", "Omni audio", "Qwen2-Audio", "SigLIP, inner states"])
def test_recomputed_layers_give_the_same_gradients(run, name):
    assert_parity(run(name, 2, True), name, 2)
    # What is recomputed is exchanged again.
    assert run(name, 2, True)[0].num_sent > run(name, 2)[0].num_sent


def assert_parity(ranks, name, degree):
    stack = STACKS[name]
    stage = stack.build()
    out, loss, gradients = train(stack, stage)
    split = split_of(stage.layers[0])
    for rank, got in enumerate(ranks):
        assert_close(got.out, out, "output")
        assert_close(got.loss, loss, "loss")
        assert set(got.gradients) == set(gradients)
        for n, want in gradients.items():
            assert torch.equal(got.values[n], part_of(stage.names[n].detach(), n, split, rank, degree)), n
            part = part_of(want, n, split, rank, degree)
            assert_close(got.gradients[n], part, f"gradient of {n}", rounding_scale(n, gradients))


@each_case
def test_what_is_whole_stays_equal_to_the_last_bit(run, name, degree):
    """And what is a part is held by one rank."""
    ranks, stage = run(name, degree), STACKS[name].build()
    first = ranks[0]
    assert set(first.gradients) > first.parts
    for got in ranks:
        assert got.parts == first.parts
        assert torch.equal(got.out, first.out)
        assert torch.equal(got.loss, first.loss)
        assert got.param_bytes == 4 * sum(v.numel() for v in got.values.values())
    for n, p in stage.names.items():
        assert sum(got.values[n].numel() for got in ranks) == p.numel() * (1 if n in first.parts else degree), n
        assert n in first.parts or all(torch.equal(got.gradients[n], first.gradients[n]) for got in ranks), n
    assert ("lm_head.weight" in first.parts) == (STACKS[name].module == LLM and name != "Qwen3 tied")
    assert ("model.language_model.embed_tokens.weight" in first.parts) == (STACKS[name].module == LLM)


@each_case
def test_ranks_exchange_no_more_often_than_documented(run, name, degree):
    stack = STACKS[name]
    # Per layer and direction twice in two halves, and gathered again twice.
    num_sent = 10 * stack.depth
    if stack.module == LLM:
        # For the embedding once; where tokens are shared at both ends once; for the loss twice, for the head once.
        num_sent += 6
    else:
        # Into the first layers and out of the last, and so around the others whose hidden states a projector takes.
        num_sent += 2 * (len(stack.build().taken_states) - 1)
    assert run(name, degree)[0].num_sent == num_sent * NUM_MICROBATCHES


def stand_in(degree):
    """A group that can be asked but not used: refusals come before the first exchange."""
    return SimpleNamespace(size=lambda: degree, rank=lambda: degree - 1)


def refuse(stack, degree):
    stage = stack.build()
    before = {n: p for n, p in stage.named_parameters()}
    with pytest.raises(ConfigError) as error:
        shard_stage(stage, stand_in(degree))
    after = dict(stage.named_parameters())
    assert set(after) == set(before)
    assert all(after[n] is p for n, p in before.items())
    return str(error.value)


def test_what_does_not_divide_is_named():
    assert "the 4 heads of `self_attn.k_proj` of LlamaDecoderLayer cannot be split over 8" in refuse(STACKS["Llama"], 8)
    vision = STACKS["Qwen2.5-VL vision"]
    assert "`attn.num_heads` of Qwen2_5_VLVisionBlock, 4, cannot be split over 3" in refuse(vision, 3)
    odd = decoder("LLaVA-OneVision", intermediate_size=50)
    assert "the width 50 of `mlp.gate_proj` of Qwen2DecoderLayer cannot be split over 4" in refuse(odd, 4)
    assert "a vocabulary of 3 cannot be split over 4" in refuse(decoder("LLaVA-OneVision", vocab_size=3), 4)
    internvit = encoder("InternVL with InternViT-6B")
    assert "`attention.q_norm.weight` of InternVLVisionLayer works on all heads" in refuse(internvit, 2)


def test_parts_keep_what_is_frozen_and_let_the_whole_go():
    stage = STACKS["Qwen3"].build()
    stage.requires_grad_(False)
    stage.head.requires_grad_(True)
    parts = shard_stage(stage, stand_in(2))
    for name, p in stage.names.items():
        assert p.requires_grad == (name == "lm_head.weight")
        assert p.is_contiguous()
        assert p.untyped_storage().nbytes() == p.nbytes, name
    for layer in stage.decoder.layers:
        split = split_of(layer)
        for name in (*split.column, *split.row):
            linear = layer.get_submodule(name)
            assert linear.weight.shape == (linear.out_features, linear.in_features)
    # The embedding and the head; in a layer seven weights and the biases of query, key and value.
    assert len(parts) == 2 + STACKS["Qwen3"].depth * (7 + 3)


def test_items_of_fewer_tokens_than_ranks_are_refused():
    layer = torch.nn.Identity()
    tokens.TowerTokens(stand_in(4)).enter(layer)
    with pytest.raises(ConfigError, match="4 tensor-parallel ranks cannot share items of 3 tokens"):
        layer(torch.zeros(2, 3, 8))
