"""Exact loss scaling, and the check a user can run on their own model."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError, TrainError
from dflop.sampler import BalancedBatchSampler, check_loss_scaling, loss_scale, sample_costs
from tests.sampler.tiny import collate, costs_of, make_dataset, make_model, num_supervised

DATASET = make_dataset()


def fetch(indices):
    return collate([DATASET[i] for i in indices])


def mean_loss(model, batch):
    return model(**batch).loss


def make(costs=None, **given) -> BalancedBatchSampler:
    return BalancedBatchSampler(
        costs or costs_of(DATASET), 16, num_replicas=2, rank=0, **{"num_microbatches": 2, **given}
    )


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["mean", "sum"]), st.booleans(),
)  # fmt: skip
def test_scaled_losses_add_up_to_the_mean_over_all_tokens(counts, reduction, averaged):
    """`counts[rank][microbatch]` tokens, each of a loss of its own."""
    rng, num_replicas = np.random.default_rng(0), len(counts)
    losses = [[rng.random(n) for n in row] for row in counts]
    total = sum(map(sum, counts))
    step = 0.0
    for row in losses:
        scaled = sum(
            (x.mean() if reduction == "mean" else x.sum())
            * loss_scale(len(x), total, num_replicas, reduction=reduction, averaged=averaged)
            for x in row
        )
        step += scaled / num_replicas if averaged else scaled
    assert step == pytest.approx(np.concatenate([x for row in losses for x in row]).mean())


def test_a_microbatch_without_a_token_that_carries_loss_weighs_nothing():
    assert loss_scale(0, 100, 4) == loss_scale(0, 0, 4) == 0


def test_a_right_loop_passes_and_is_told_what_it_is_spared():
    found = check_loss_scaling(make(), make_model(), mean_loss, fetch, tolerance=1e-5)
    assert found.error_frac < 1e-5 < 1e-2 < found.naive_error_frac


@pytest.mark.parametrize("sampler", [make(max_tokens=90, num_microbatches=None), make(sync="microbatch")])
def test_sums_and_counts_from_the_labels_pass_too(sampler):
    def sum_loss(model, batch):
        return mean_loss(model, batch) * num_supervised(batch)

    assert check_loss_scaling(sampler, make_model(), sum_loss, fetch, reduction="sum", step=1).error_frac < 1e-5
    unknown = dataclasses.replace(sampler.costs, supervised=None)
    found = check_loss_scaling(make(unknown), make_model(), mean_loss, fetch, count=num_supervised)
    assert found.error_frac < 1e-5


def test_a_wrong_count_is_found():
    """Labels that are never predicted, the first of each sequence, were counted along with the prompt."""
    wrong = sample_costs([len(s["input_ids"]) for s in DATASET], supervised=[len(s["labels"]) for s in DATASET])
    with pytest.raises(TrainError, match="differ by") as error:
        check_loss_scaling(make(wrong), make_model(), mean_loss, fetch)
    assert "unscaled they would differ by" in str(error.value)


def test_a_wrong_reduction_and_padding_that_reaches_attention_are_found():
    def blind(model, batch):
        return model(input_ids=batch["input_ids"].flip(1), labels=batch["labels"].flip(1)).loss  # left-padded, no mask

    with pytest.raises(TrainError):
        check_loss_scaling(make(), make_model(), mean_loss, fetch, reduction="sum")
    with pytest.raises(TrainError):
        check_loss_scaling(make(), make_model(), blind, fetch)


def test_the_check_leaves_the_model_as_it_was():
    model = make_model().train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    check_loss_scaling(make(), model, mean_loss, fetch)
    assert model.training
    assert (model.lm_head.weight.grad == 1).all()
    assert model.model.embed_tokens.weight.grad is None


def test_counts_that_nobody_knows_are_asked_for():
    sampler = make(dataclasses.replace(costs_of(DATASET), supervised=None))
    with pytest.raises(ConfigError, match="how many tokens"):
        next(sampler.steps()).loss_scales()
    with pytest.raises(ConfigError, match="how many tokens"):
        check_loss_scaling(sampler, make_model(), mean_loss, fetch)
