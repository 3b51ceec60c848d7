"""Two ranks of the engine on one GPU: gradients in float32, and in bfloat16 with a variable-length kernel.

NCCL refuses two ranks on one device, so messages go over gloo and through host memory; kernels, types and devices are
what they are in training.
"""

from __future__ import annotations

import pytest
import torch

from tests.train.half import LAYOUTS, assert_as_exact_as_hugging_face, trial_of
from tests.train.parity import assert_equal_steps, reference, run_trial


@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_equals_hugging_face(cuda, name, tmp_path):
    trial = trial_of(name, "cuda:0", torch.float32)
    assert_equal_steps(run_trial(trial, tmp_path), reference(trial.subject, device="cuda:0"), tolerance=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bfloat16_is_as_exact_as_hugging_face(cuda, name, tmp_path):
    assert_as_exact_as_hugging_face(name, "cuda:0", tmp_path)
