"""What every parity test does: train a few steps in some layout and hold them against a plain Hugging Face run.

The reference is Hugging Face's own model, forward and attention, one sample at a time in one process. A subject is a
tiny model with samples; a `Trial` puts it into a layout. Both sides take the same plain gradient steps, so a later step
also tells whether the weights that replicas, stages and parts hold are still those of one model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dflop.models import offload
from dflop.models.family import Family
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.train.inputs import SampleSource
from tests.train import synthetic
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, make_shapes

LEARNING_RATE = 0.05
TOLERANCE = 1e-5
ROUTER_LOSS = "router loss"
Step = tuple[float, float, dict[str, Any]]
"""Loss, gradient norm, gradients by name; of what tensor-parallel ranks share, the list of parts."""


@dataclass(frozen=True)
class Omni:
    """A tiny model, and global batches for it: Qwen2.5-Omni's thinker with two encoders and three kinds of media."""

    kinds: tuple[str, ...] = ("image", "video", "audio")
    tied: bool = False
    kv_heads: int = 1
    num_steps: int = 3
    batch_size: int = 12
    seed: int = 3

    @property
    def family(self) -> Family:
        return synthetic.family(self.kv_heads)

    @cached_property
    def batches(self) -> list[list[SampleShape]]:
        shapes = make_shapes(self.num_steps * self.batch_size, seed=self.seed, kinds=self.kinds)
        return [shapes[i * self.batch_size : (i + 1) * self.batch_size] for i in range(self.num_steps)]

    def build(self) -> torch.nn.Module:
        """As every rank builds it."""
        return synthetic.tiny_model(tied=self.tied, kv_heads=self.kv_heads)

    def plain(self) -> torch.nn.Module:
        """The same weights with Hugging Face's own attention."""
        return synthetic.plain_model(tied=self.tied, kv_heads=self.kv_heads)

    def source(self, batch: Sequence[SampleShape]) -> SampleSource:
        return SyntheticSource(batch)

    def loss_sum(self, plain: torch.nn.Module, batch: Sequence[SampleShape], position: int) -> torch.Tensor:
        """Summed loss of one sample by Hugging Face's own forward."""
        return synthetic.loss_sum(plain, SyntheticSource(batch), batch[position])


@dataclass(frozen=True)
class Trial:
    """A subject in a layout, with a plan for each of its batches."""

    subject: Any
    """`Omni`, or what has its methods; picklable."""
    plan: Plan
    step_plans: tuple[StepPlan, ...]
    frozen: tuple[str, ...] = ()
    """Modules, or towers without their projectors, whose weights do not train."""
    bad_positions: tuple[int, ...] = ()
    """Of every batch, samples that carry no loss."""
    device: str = "cpu"
    """Of every rank; on one GPU several share it."""
    dtype: torch.dtype = torch.float32
    compiler: str = ""
    fp8: str = "off"
    router_loss: float | None = None
    """Coefficient; its value then stands among the gradients, under `ROUTER_LOSS`."""


def reference(
    subject: Any, *, frozen: Collection[str] = (), bad_positions: Collection[int] = (), device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Step]:  # fmt: skip
    """The steps by Hugging Face's own forward and attention, one sample at a time; gradients are on the CPU."""
    exact_on(device)
    plain = subject.plain().to(device, dtype)
    for name, p in plain.named_parameters():
        p.requires_grad_(p.requires_grad and not is_frozen(name, subject.family, frozen))
        p.grad_dtype = torch.float32
    steps = []
    for batch in subject.batches:
        kept = [p for p in range(len(batch)) if p not in bad_positions]
        denominator, loss = sum(batch[p].num_supervised_tokens for p in kept), 0.0
        for position in kept:
            part = subject.loss_sum(plain, batch, position)
            if part.requires_grad:  # not that of a text through a frozen LLM
                (part / denominator).backward()
            loss += float(part.detach()) / denominator
        gradients = {n: p.grad.float().cpu() for n, p in plain.named_parameters() if p.grad is not None}
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        steps.append((loss, norm, gradients))
        descend(plain.parameters(), subject)
        plain.zero_grad()
    return steps


def module_of(name: str, family: Family) -> str:
    """Which module a parameter of a whole model belongs to, by Hugging Face's names alone."""
    for module, tower in family.towers.items():
        # Older releases have Omni's towers without the prefix.
        for path in (tower.path, tower.path.removeprefix("model."), *tower.extras):
            if name == path or name.startswith(f"{path}."):
                return module
    return LLM


PROJECTORS = (
    "visual.merger.", "visual.deepstack_merger_list.", "audio_tower.proj.", "multi_modal_projector.", "image_newline",
)  # fmt: skip
"""In Hugging Face's names, of all families."""


def is_frozen(name: str, family: Family, frozen: Collection[str]) -> bool:
    """Whether a parameter of a whole model does not train."""
    module = module_of(name, family)
    return module in frozen or (f"{module}.tower" in frozen and not any(part in name for part in PROJECTORS))


def exact_on(device: str) -> None:
    """Float32 is float32 on a GPU, too, and a CPU adds in one order."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def descend(parameters: Any, subject: Any) -> None:
    """One step of plain gradient descent."""
    rate = getattr(subject, "rate", LEARNING_RATE)
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p -= rate * p.grad


def run_trial(trial: Trial, folder: Path) -> list[list[Step]]:
    """The steps of every rank."""
    return run_ranks(train, trial.plan.num_processes, folder, trial)


def train(rank: int, folder: Path, trial: Trial) -> list[Step]:
    """The steps of one rank of a trial, run by feed, engine and reducer; in front of the last, its loss alone."""
    exact_on(trial.device)
    subject = trial.subject
    it = Rank(
        rank, trial.plan, subject.family, subject.build().to(trial.dtype), frozen=trial.frozen, device=trial.device,
        compiler=trial.compiler, fp8=trial.fp8, router_loss=trial.router_loss,
    )  # fmt: skip
    trained = {n: p for n, p in it.names.items() if p.requires_grad}
    steps = []
    for number, (batch, step_plan) in enumerate(zip(subject.batches, trial.step_plans, strict=True), 1):
        seen = _loss_alone(it, trial, batch, step_plan) if number == len(subject.batches) else None
        with patch.object(offload, "LEAST_BYTES", 0):
            norm, loss = it.reduce(it.step(subject.source(batch), batch, step_plan, trial.bad_positions))
        assert seen is None or math.isclose(seen, loss, rel_tol=TOLERANCE), "loss of forward passes"
        steps.append((loss, norm, {n: _whole(n, p, it) for n, p in trained.items()}))
        if it.router_loss:
            steps[-1][2][ROUTER_LOSS] = torch.tensor(it.router_loss.value)
        descend(trained.values(), subject)
        it.reducer.zero()
    return steps


def _loss_alone(it: Rank, trial: Trial, batch: Sequence[SampleShape], step_plan: StepPlan) -> float:
    """The loss of a global batch by forward passes, which leave nothing behind."""
    trace = it.step(trial.subject.source(batch), batch, step_plan, trial.bad_positions, is_training=False)
    assert not any(p.grad is not None and p.grad.any() for p in it.names.values())
    return it.reducer.totals(trace.loss)[1]


def _whole(name: str, parameter: torch.Tensor, it: Rank) -> torch.Tensor:
    """A gradient, put together of the pieces that replicas and tensor-parallel ranks hold of it."""
    assert parameter.grad is not None, f"{name} has no gradient"
    gradient, part = parameter.grad.cpu().clone(), it.parts.get(name)
    if part is None:
        return gradient
    pieces = list(part.pieces(gradient))
    for group in (it.groups.shards or it.groups.experts, it.groups.tensor):
        if group is not None:
            of_ranks = [pieces] * group.size()
            dist.all_gather_object(of_ranks, pieces, group=group)
            pieces = [piece for of_rank in of_ranks for piece in of_rank]
    whole = torch.full(part.shape, torch.nan)
    for start, piece in pieces:
        whole[tuple(slice(at, at + n) for at, n in zip(start, piece.shape, strict=True))] = piece
    return whole


def assert_equal_steps(ranks: Sequence[Sequence[Step]], expected: Sequence[Step], tolerance: float = TOLERANCE) -> None:
    """Losses, norms and every gradient of all ranks equal the reference's, and together they hold every gradient."""
    for step, (loss, norm, gradients) in enumerate(expected):
        for rank in ranks:
            got_loss, got_norm, got_gradients = rank[step]
            assert math.isclose(got_loss, loss, rel_tol=tolerance), f"loss of step {step}: {got_loss}, not {loss}"
            assert math.isclose(got_norm, norm, rel_tol=tolerance), f"norm of step {step}: {got_norm}, not {norm}"
            for name, got in got_gradients.items():
                _assert_close(f"step {step}: {name}", got, gradients.get(name), tolerance)
        covered = {name for rank in ranks for name in rank[step][2]}
        assert set(gradients) <= covered, "a parameter with a gradient is held by no rank"


def _assert_close(name: str, got: torch.Tensor, want: torch.Tensor | None, tolerance: float) -> None:
    if want is None:  # nothing depends on it: an unused embedding
        assert not got.any(), f"{name} has a gradient"
        return
    # Without rope, attention does not depend on a key's bias: all of its gradient is rounding.
    least = 1e-7 if name.endswith("k_proj.bias") else 1e-17
    error = float((got - want).abs().max())
    assert error <= max(tolerance * float(want.abs().max()), least), f"{name} off by {error:.2e}"
