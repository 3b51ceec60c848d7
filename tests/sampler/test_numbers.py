"""Numbers that people give are looked at: what is none, or cannot be, names its argument."""

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from dflop.errors import ConfigError
from dflop.sampler import BalancedBatchSampler, SampleCosts, sample_costs

NO_LENGTHS = (-1, "17", None, True, float("inf"), Decimal("2"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lengths": []}, "no samples"),
        ({"lengths": [1, 2], "cost": [1.0]}, "shape"),
        ({"lengths": [1, 2], "supervised": [1]}, "shape"),
        ({"lengths": [3, 4], "cost": [1.0, float("nan")]}, "cost of sample 1 is nan"),
        ({"lengths": [3, 2.5]}, "lengths of sample 1 is 2.5, must be a whole number"),
        *(({"lengths": [3, n]}, re.escape(f"lengths of sample 1 is {n!r}")) for n in NO_LENGTHS),
        ({"lengths": ["3", "17"]}, "lengths of sample 0 is '3'"),
        ({"lengths": [[3, 4]]}, r"lengths of sample 0 is \[3, 4\]"),
        ({"lengths": np.ones((2, 2), int)}, r"lengths has shape \(2, 2\)"),
        ({"lengths": np.array(["3", "4"])}, "lengths of sample 0 is '3'"),
        ({"lengths": [3, 2**63]}, "lengths of sample 1 is"),
        ({"lengths": [3, 4], "cost": ["1", 2]}, "cost of sample 0 is '1'"),
        ({"lengths": [3, 4], "cost": lambda i: None}, "cost of sample 0 is None"),
        ({"lengths": [3, 4], "cost": lambda i: 1 - 2 * i}, "cost of sample 1 is -1"),
        ({"lengths": [3, 4], "cost": [1, Fraction(1, 2)]}, "cost of sample 1 is"),
        ({"lengths": [3, 4], "supervised": [1, -100]}, "supervised of sample 1 is -100"),
        ({"lengths": [3, 4], "supervised": [1, 5]}, "supervised of sample 1 is 5, it has 4 tokens"),
        ({"lengths": [3, 4], "supervised": [1, 0.5]}, "supervised of sample 1 is 0.5"),
        ({"lengths": [3, 4], "fixed": float("nan")}, "fixed_s of sample 0 is nan"),
    ],
)
def test_costs(given, words):
    with pytest.raises(ConfigError, match=words):
        sample_costs(**given)


@pytest.mark.parametrize(
    "lengths", [[3, 4.0], np.array([3.0, 4.0]), np.array([3, 4], np.uint8), torch.tensor([3, 4]), range(3, 5), (3, 4)]
)
def test_whole_numbers_in_any_form_are_taken(lengths):
    assert sample_costs(lengths).tokens.tolist() == [3, 4]


@pytest.mark.parametrize("name", ["global_batch_size", "num_microbatches", "max_tokens"])
@pytest.mark.parametrize("value", ["8", 8.0, 2.5, True, 0, -1, float("nan")])
def test_sizes(name, value):
    given = {"global_batch_size": 2, name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, must be a positive whole number"):
        BalancedBatchSampler([3, 4], **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"index": np.array([1, 1])}, "index names a sample twice"),
        ({"index": np.array([1, -1])}, "index of sample 1 is -1"),
        ({"weights": np.array([1.0, -0.5])}, "weights of sample 1 is -0.5"),
        ({"weights": np.array([1.0, np.nan])}, "weights of sample 1 is nan"),
    ],
)
def test_fields_of_costs(given, words):
    with pytest.raises(ConfigError, match=words):
        SampleCosts(np.ones(2), np.array([3, 4]), **given)
