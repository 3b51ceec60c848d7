"""FP8 in the LLM's layers: how far a step is from one without, in every way of sharing it out; messages stay as many.

A CPU multiplies the same 8-bit values in float32, so errors are those of a GPU but for the order of sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflop.records import LLM
from tests.train.layouts import ONE, Layout
from tests.train.parity import Step, Trial, run_trial, train
from tests.train.ranks import run_ranks
from tests.train.synthetic import ALL
from tests.train.test_parity import cached_reference

pytest.importorskip("torchao.float8", reason="needs the packages of dflop[fp8]")

ERRORS = {"tensorwise": (2e-4, 0.08), "rowwise": (2e-4, 0.06)}
"""Of the loss, and of all gradients together (Frobenius norm), relative to float32; measured: at most 1.2e-4, and 6.0
and 4.3 %."""
SHARDED = Layout(ONE, dp=2, sharded=ALL, recompute=(LLM,), half=True, offloaded=True)
LAYOUTS = {"one": Layout(ONE), "sharded": SHARDED, "tp2": Layout(({"vision": 2, LLM: 4},), tp=2)}


def gradient_error_frac(got: Step, want: Step) -> float:
    (*_, ours), (*_, exact) = got, want
    shared = [name for name in ours if name in exact]
    off = torch.stack([(ours[name] - exact[name]).norm() for name in shared])
    return float(off.norm() / torch.stack([exact[name].norm() for name in shared]).norm())


@pytest.mark.budget(60, "ranks import torchao")
@pytest.mark.parametrize("recipe", ERRORS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_near_one_in_float32(name, recipe, tmp_path):
    of_loss, of_gradients = ERRORS[recipe]
    trial = replace(LAYOUTS[name].trial, fp8=recipe)
    for rank in run_trial(trial, tmp_path):
        for got, want in zip(rank, cached_reference(trial.subject), strict=True):
            assert got[0] == pytest.approx(want[0], rel=of_loss)
            assert 0.005 < gradient_error_frac(got, want) < of_gradients, "too far, or no FP8 at all"


class Messages(TorchDispatchMode):
    """Counts collectives by kind and by the bytes of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen[func.name(), sum(t.nbytes for t in tensors)] += 1
        return func(*args, **(kwargs or {}))


def messages(rank: int, folder: Path, trial: Trial) -> Counter[tuple[str, int]]:
    """Those of a trial's steps."""
    with Messages() as mode:
        train(rank, folder, trial)
    return mode.seen


def counted(trial: Trial, folder: Path) -> Sequence[Counter[tuple[str, int]]]:
    folder.mkdir()
    return run_ranks(messages, trial.plan.num_processes, folder, trial)


@pytest.mark.budget(60, "ranks import torchao")
@pytest.mark.parametrize("name", ["sharded", "tp2"])
def test_fp8_sends_no_message_and_no_byte_of_its_own(name, tmp_path):
    trial = LAYOUTS[name].trial
    without = counted(trial, tmp_path / "without")
    assert sum(without[0].values()) > 20
    assert counted(replace(trial, fp8="tensorwise"), tmp_path / "fp8") == without


@pytest.mark.lane("layouts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_layers_multiply_alike(name, tmp_path):
    trial = replace(LAYOUTS[name].trial, fp8="rowwise", compiler="aot_eager")
    for rank in run_trial(trial, tmp_path):
        for got, want in zip(rank, cached_reference(trial.subject), strict=True):
            assert 0.005 < gradient_error_frac(got, want) < ERRORS["rowwise"][1]
