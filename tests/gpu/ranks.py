"""Several ranks on one device, over gloo: parts of `evidence`. Kernels, types and devices are those of training."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from dflop.records import LLM, Plan
from dflop.train.checkpoint import Checkpointer
from dflop.train.engine import Engine
from dflop.train.loop import Hooks, LoopSettings
from dflop.train.plan_source import PlanMessage
from tests.gpu.drawn import ROOT
from tests.gpu.subject import Subject
from tests.train import half as half_precision
from tests.train.layouts import LAYOUTS, OTHERS
from tests.train.layouts_context import HEART
from tests.train.parity import Trial, assert_equal_steps, reference, run_trial, train
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import (
    SyntheticSource,
    family,
    make_inline_plan,
    make_shapes,
    make_step_plan,
    tiny_model,
)

MOST_RANKS = 4
TOLERANCE = 1e-4
PACKAGES = (
    "PIL", "cvxpy", "cyclopts", "duckdb", "jinja2", "matplotlib", "polars", "psutil", "pydantic", "rich", "ruamel",
    "scipy", "submitit", "tokenizers", "yaml",
)  # fmt: skip
"""What `dflop train` needs beside torch, transformers, numba, pyarrow and numpy."""
JITTERED = ("vision + llm pp2, on the host", "inline tp2", "inline dp2, sharded, half recomputed, half on the host")
NUM_STEPS, BATCH_SIZE, CUT_AT, BAD_STEP = 6, 6, 4, 2


class Needs(Exception):
    """A part cannot run here, for want of something."""


def job(subject: Subject, deadline_s: float, *, ranks: int) -> Iterator[Mapping[str, Any]]:
    """`dflop train` from profiles to report, stopped and resumed: what `tests.gpu.job` finds."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise Needs(", ".join(missing))
    folder = subject.folder / f"job-{ranks}"
    command = ["--out", str(folder), "--ranks", str(ranks), "--seconds", str(max(60.0, deadline_s - time.monotonic()))]
    command += ["--device", subject.device.type, *(["--tiny"] if subject.is_tiny else [])]
    done = subprocess.run([sys.executable, "-m", "tests.gpu.job", *command], cwd=ROOT, check=False)
    yield from (json.loads(line) for line in (folder / "job.jsonl").read_text().splitlines())
    if done.returncode:
        raise RuntimeError(f"tests.gpu.job ended with {done.returncode}; see {folder.name}/job.tar.gz")


def loop(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Training loop and checkpoints alone, without profiles and store: cut off, resumed, equal to one that was not."""
    plans = {
        "one rank": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=3),
        "pp2": make_inline_plan([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], dp=1, num_microbatches=3),
        "dp2": make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=2, num_microbatches=3),
    }
    for name, plan in plans.items():

        def compare(folder: Path, plan: Plan = plan) -> None:
            run = partial(run_ranks, _trained, plan.num_processes, folder)
            straight, first, rest = (
                run(plan, _device(subject), place, cut)[0]
                for place, cut in (("straight", None), ("cut", CUT_AT), ("cut", None))
            )
            assert [*first[:CUT_AT], *rest] == straight, f"{straight} straight, {first} and {rest} resumed"

        yield {"layout": name, "ranks": plan.num_processes, "steps": NUM_STEPS, "cut_at": CUT_AT, **outcome(compare)}
        if time.monotonic() > deadline_s:
            return


class _Plans:
    """Step `cut_at` never comes."""

    def __init__(self, plan: Plan, shapes: list[Any], cut_at: int | None) -> None:
        self._plan, self._shapes, self._cut_at = plan, shapes, cut_at

    def get(self, step: int) -> PlanMessage:
        if step == self._cut_at:
            raise ConnectionError("cut off")
        batch = self._shapes[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        return PlanMessage(make_step_plan(self._plan, batch, step, text_only_slot=False), {})


def _trained(
    rank: int, folder: Path, plan: Plan, device: str, place: str, cut_at: int | None, *, bad_step: int | None = None
) -> list[float]:
    """Losses of a start of a job, those of a resumed one from its checkpoint on."""
    torch.use_deterministic_algorithms(True)
    shapes, losses = make_shapes(NUM_STEPS * BATCH_SIZE, seed=4), list[float]()
    source = SyntheticSource(shapes) if bad_step is None else _InfinitePixel(shapes, bad_step)
    it = Rank(rank, plan, family(), tiny_model(), device=device, weight_decay=0.01)
    checkpointer = Checkpointer(folder / place, it.stages, it.optimizer, it.groups, it.parts, keep=2)
    train_settings: Any = SimpleNamespace(
        checkpoint_every=2, checkpoint_every_s=0.0, trace_every_steps=0, prefetch_steps=1, seed=0, max_grad_norm=1.0,
        warmup_steps=0,
    )  # fmt: skip
    trainer = it.trainer(
        LoopSettings(train_settings, "evidence", 0, NUM_STEPS, 0.003), source, _Plans(plan, shapes, cut_at),
        Hooks(lambda seen: losses.append(seen.loss), lambda *event: None), checkpointer=checkpointer,
    )  # fmt: skip
    try:
        trainer.run()
    except ConnectionError:
        assert cut_at is not None
    checkpointer.close()
    assert all(p.isfinite().all() for p in it.names.values()), "weights are not finite"
    return losses


class _InfinitePixel(SyntheticSource):
    def __init__(self, shapes: list[Any], step: int) -> None:
        super().__init__(shapes)
        self._sample = next(s.sample_index for s in shapes[step * BATCH_SIZE :] if s.items)

    def array(self, sample_index: int, item: int) -> np.ndarray:
        found = super().array(sample_index, item)
        if (sample_index, item) == (self._sample, 0):
            found.flat[0] = np.inf
        return found


def layouts(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Which layouts have the losses and gradients of Hugging Face, in float32."""
    every = LAYOUTS | HEART | OTHERS
    known = {name: layout for name, layout in every.items() if layout.plan.num_processes <= MOST_RANKS}
    for name in [*known][: subject.size(len(known), 4)]:
        layout = known[name]
        trial = replace(layout.trial, device=_device(subject))
        options = {"frozen": layout.frozen, "bad_positions": layout.bad, "device": trial.device}

        def compare(folder: Path, trial: Any = trial, options: Any = options) -> None:
            expected = reference(trial.subject, **options)
            assert_equal_steps(run_trial(trial, folder), expected, tolerance=TOLERANCE)

        yield {"layout": name, "ranks": trial.plan.num_processes, **outcome(compare)}
        if time.monotonic() > deadline_s:
            return


def half(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """The same in bfloat16, of layouts of two ranks: as far from float32 as Hugging Face."""
    for name in [*half_precision.LAYOUTS][: subject.size(len(half_precision.LAYOUTS), 1)]:
        compare = partial(half_precision.assert_as_exact_as_hugging_face, name, _device(subject))
        yield {"layout": name, **outcome(compare)}
        if time.monotonic() > deadline_s:
            return


def jitter(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Whether steps have the same bits when layers and messages are delayed at random, on device and host."""
    for name in JITTERED[: subject.size(len(JITTERED), 2)]:
        trial = replace((LAYOUTS | OTHERS)[name].trial, device=_device(subject))

        def compare(folder: Path, trial: Trial = trial) -> None:
            run = partial(run_ranks, _delayed, trial.plan.num_processes, folder, trial)
            for one, other in zip(run(0), run(1), strict=True):
                for (loss, norm, gradients), (loss_, norm_, gradients_) in zip(one, other, strict=True):
                    assert (loss, norm) == (loss_, norm_)
                    different = [n for n, g in gradients.items() if not _equal(g, gradients_[n])]
                    assert not different, different[:5]

        yield {"layout": name, "ranks": trial.plan.num_processes, **outcome(compare)}
        if time.monotonic() > deadline_s:
            return


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return str(one) == str(other)  # parts of tensor-parallel ranks


def _delayed(rank: int, folder: Path, trial: Trial, seed: int) -> Any:
    """The steps of one rank; delays of up to a millisecond unless the seed is 0."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    drawn = random.Random(f"{seed} {rank}")

    def delay(*_: Any, **__: Any) -> None:
        if seed and drawn.random() < 0.3:
            if trial.device != "cpu":
                torch.cuda._sleep(drawn.randrange(2_000_000))
            if drawn.random() < 0.5:
                time.sleep(1e-3 * drawn.random())

    def delayed(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (delay(), method(*args, **options))[1]

    hook = torch.nn.modules.module.register_module_forward_pre_hook(delay)
    try:
        with patch.multiple(dist, isend=delayed(dist.isend), irecv=delayed(dist.irecv)):
            return train(rank, folder, trial)
    finally:
        hook.remove()


def faults(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Whether a rank that has no memory, or is killed, is named, and how soon all end; what an infinite pixel does."""
    trial = replace(LAYOUTS["vision + llm pp2, vision frozen"].trial, device=_device(subject))
    for fault, named in (("out of memory", "rank 1 ("), ("killed", "SIGKILL")):
        row = outcome(lambda folder, fault=fault: run_ranks(_faulty, 3, folder, trial, fault))
        said = " / ".join(row["error"].splitlines()[-2:])
        yield {"fault": fault, "named": named in row["error"], "ended_s": row["wall_s"], "said": said}
        if time.monotonic() > deadline_s:
            return
    plan, found = make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=3), list[Any]()

    def pixel(folder: Path) -> None:
        worker = partial(_trained, bad_step=BAD_STEP)
        found.extend(run_ranks(worker, 1, folder, plan, _device(subject), "pixel", None)[0])
        assert [math.isfinite(loss) for loss in found] == [step != BAD_STEP for step in range(NUM_STEPS)], found

    yield {"fault": "an infinite pixel", **outcome(pixel), "losses": [str(loss) for loss in found]}


def _faulty(rank: int, folder: Path, trial: Trial, fault: str) -> None:
    forward = Engine._forward

    def failing(self: Engine, k: int, *args: Any) -> None:
        if rank == 1 and k == 2:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory, as drawn")
        forward(self, k, *args)

    with patch.object(Engine, "_forward", failing):
        train(rank, folder, trial)


def _device(subject: Subject) -> str:
    return "cuda:0" if subject.device.type == "cuda" else "cpu"


def outcome(work: Callable[[Path], Any]) -> dict[str, Any]:
    """Seconds of some work in a new folder, and its error if it has one."""
    started_s, error = time.monotonic(), ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            work(Path(folder))
    except Exception as raised:  # the others are worth as much
        error = f"{type(raised).__name__}: {raised}"[-1500:]
    return {"error": error, "wall_s": round(time.monotonic() - started_s, 2)}
