"""Parity in bfloat16, where no two programs agree to the last bits: who is how far from float32?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from dflop.records import LLM
from tests.train.parity import Omni, Step, Trial, reference, run_trial
from tests.train.synthetic import make_inline_plan, make_plan, make_step_plan

SUBJECT = Omni(num_steps=1, kv_heads=2)
LAYOUTS = {
    "vision + llm": (make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=4), ("image", "video")),
    "inline pp2": (
        make_inline_plan([{"vision": 2}, {"audio": 2, LLM: 4}], dp=1, num_microbatches=4),
        ("image", "video", "audio"),
    ),
    "inline dp2": (
        make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=2, num_microbatches=4), ("image", "video", "audio"),
    ),
    "inline cp2": (
        make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, cp=2, num_microbatches=4),
        ("image", "video", "audio"),
    ),
    "inline tp2": (make_inline_plan([{"vision": 2, LLM: 4}], dp=1, tp=2, num_microbatches=4), ("image", "video")),
}  # fmt: skip
"""Plans of two ranks, and the media they take."""
WORSE = 1.5
"""Times as far from float32 as Hugging Face: another order of adding."""

cached_reference = cache(reference)


def trial_of(name: str, device: str, dtype: torch.dtype) -> Trial:
    """A layout of this file on a device that its ranks share."""
    plan, kinds = LAYOUTS[name]
    subject = replace(SUBJECT, kinds=kinds)
    plans = tuple(make_step_plan(plan, batch, step) for step, batch in enumerate(subject.batches))
    return Trial(subject, plan, plans, device=device, dtype=dtype)


def assert_as_exact_as_hugging_face(name: str, device: str, folder: Path) -> None:
    """A step of a layout in bfloat16, of the engine and of Hugging Face, both held against float32.

    Raises:
        AssertionError: the engine's loss or gradients are much further away.
    """
    trial = trial_of(name, device, torch.bfloat16)
    (exact,) = cached_reference(trial.subject, device=device)
    (plain,) = cached_reference(trial.subject, device=device, dtype=torch.bfloat16)
    ranks = [steps[0] for steps in run_trial(trial, folder)]
    found = {n: g for rank in ranks for n, g in rank[2].items()}
    assert set(exact[2]) <= set(found)
    ours, theirs = _distance(found, exact), _distance(plain[2], exact)
    assert 0 < theirs < 0.2
    assert ours <= WORSE * theirs, f"gradients are {ours:.3f} from float32, Hugging Face's are {theirs:.3f}"
    for loss, norm, _ in ranks:
        assert abs(loss / exact[0] - 1) <= 0.01
        assert abs(norm / exact[1] - 1) <= 0.05


def _distance(found: dict[str, torch.Tensor | Sequence[torch.Tensor]], exact: Step) -> float:
    """Of all gradients together, relative to their norm."""
    squares = 0.0
    for name, want in exact[2].items():
        got = found[name]
        whole = got
        squares += float((whole.float() - want).pow(2).sum())
    return float(squares**0.5 / exact[1])
