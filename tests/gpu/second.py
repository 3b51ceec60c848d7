"""Try on one GPU what has run on CPUs only: `python -m tests.gpu.second --minutes 9 --out FOLDER`.

Parts run in order of worth and append every result to `FOLDER/PART.jsonl` at once, as those of `evidence` do:

- `job`: `python -m tests.gpu.job`, which runs `dflop train` whole, interrupts and resumes it;
- `layouts`: parallel layouts of at most four ranks, which share the GPU over gloo, against Hugging Face in float32;
- `half`: layouts of two ranks in bfloat16;
- `host_waits`: lines of code at which the engine waits for the device, in every model family;
- `alone`: a world of one over NCCL: collectives that training calls, and a step;
- `repeated`: whether a step has the same bits again, with `train.deterministic` and without;
- `shared`: `dflop train` with two ranks on the GPU (`cluster.ranks_per_gpu`).

`--device cpu --tiny` rehearses all of it, a few layouts in place of all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflop.records import LLM
from tests.gpu.drawn import ROOT
from tests.gpu.evidence import Part, circumstances, run_part
from tests.gpu.host import engine_waits
from tests.gpu.subject import Subject, released, tiny
from tests.models.tiny_families import CASES
from tests.train import half as half_precision
from tests.train.parity import Omni, assert_equal_steps, reference, run_trial
from tests.train.rank import Rank
from tests.train.synthetic import make_inline_plan, make_step_plan
from tests.train.test_parity import LAYOUTS, OTHERS
from tests.train.test_parity_context import HEART
from tests.train.test_parity_families import Tiny

MOST_RANKS = 4
TOLERANCE = 1e-4


def job(subject: Subject, deadline_s: float, *, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Exit codes and seconds of the phases of `tests.gpu.job`; all else is in its own folder."""
    folder = subject.folder / f"job-{ranks}"
    command = ["--out", str(folder), "--ranks", str(ranks), "--seconds", str(max(60.0, deadline_s - time.monotonic()))]
    command += ["--device", subject.device.type, *(["--tiny"] if subject.is_tiny else [])]
    done = subprocess.run([sys.executable, "-m", "tests.gpu.job", *command], cwd=ROOT, check=False)
    rows = [json.loads(line) for line in (folder / "job.jsonl").read_text().splitlines()]
    yield from (row for row in rows if "phase" in row)
    yield {"exit_code": done.returncode}


def layouts(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Which layouts have the losses and gradients of Hugging Face."""
    every = LAYOUTS | HEART | OTHERS
    known = {name: layout for name, layout in every.items() if layout.plan.num_processes <= MOST_RANKS}
    for name in [*known][: subject.size(len(known), 2)]:
        layout = known[name]
        trial = replace(layout.trial, device=_device(subject))
        options = {"frozen": layout.frozen, "bad_positions": layout.bad, "device": trial.device}

        def compare(folder: Path, trial: Any = trial, options: Any = options) -> None:
            expected = reference(trial.subject, **options)
            assert_equal_steps(run_trial(trial, folder), expected, tolerance=TOLERANCE)

        yield {"layout": name, "ranks": trial.plan.num_processes, **_outcome(compare)}
        if time.monotonic() > deadline_s:
            return


def half(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """The same in bfloat16, of layouts of two ranks."""
    for name in [*half_precision.LAYOUTS][: subject.size(len(half_precision.LAYOUTS), 1)]:
        compare = partial(half_precision.assert_as_exact_as_hugging_face, name, _device(subject))
        yield {"layout": name, **_outcome(compare)}
        if time.monotonic() > deadline_s:
            return


def host_waits(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Of every family, where the engine waits in a step of two microbatches."""
    for name in CASES:
        for row in engine_waits(Tiny(name), subject.device, num_microbatches=2):
            yield {"family": name, **row}
        if time.monotonic() > deadline_s:
            return


def alone(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """A world of one: collectives that training calls, then a step whose groups have one rank each."""
    device, values = subject.device, torch.ones(64, device=subject.device)
    with _world_of_one("nccl" if device.type == "cuda" else "gloo"):
        calls: Mapping[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(values),
            "reduce": lambda: dist.reduce(values, group=dist.group.WORLD, group_dst=0),
            "broadcast": lambda: dist.broadcast(values, group=dist.group.WORLD, group_src=0),
            "all_gather": lambda: dist.all_gather([torch.empty_like(values)], values),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(values), values),
            "step": lambda: _step(subject),
        }
        for name, call in calls.items():
            yield {"call": name, **_outcome(lambda _, call=call: call())}
            if time.monotonic() > deadline_s:
                return


def repeated(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Whether two runs of a step have the same bits."""
    for is_deterministic in (True, False):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            with _world_of_one("gloo"):
                first, second = _step(subject), _step(subject)
            different = sorted(name for name, gradient in first.items() if not torch.equal(gradient, second[name]))
            yield {"deterministic": is_deterministic, "gradients": len(first), "different": different}
        finally:
            torch.use_deterministic_algorithms(False)


PARTS: Mapping[str, tuple[Part, float]] = {
    "job": (partial(job, ranks=1), 0.3),
    "layouts": (layouts, 0.35),
    "half": (half, 0.08),
    "host_waits": (host_waits, 0.04),
    "alone": (alone, 0.04),
    "repeated": (repeated, 0.04),
    "shared": (partial(job, ranks=2), 0.25),
}
"""What measures until a deadline, and its share of the minutes; what a part leaves goes to those behind it."""


def _device(subject: Subject) -> str:
    return "cuda:0" if subject.device.type == "cuda" else "cpu"


def _outcome(work: Callable[[Path], Any]) -> dict[str, Any]:
    """Seconds of some work in a new folder, and its error if it has one."""
    started_s, error = time.monotonic(), ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            work(Path(folder))
    except Exception as raised:  # the others are worth as much
        error = f"{type(raised).__name__}: {raised}"[-1500:]
    return {"error": error, "wall_s": round(time.monotonic() - started_s, 2)}


@contextmanager
def _world_of_one(backend: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _step(subject: Subject) -> dict[str, torch.Tensor]:
    """Gradients of a step of a tiny Omni, by name."""
    omni, is_cuda = Omni(num_steps=1), subject.device.type == "cuda"
    plan = make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=4)
    model = omni.build().to(torch.bfloat16 if is_cuda else torch.float32)
    rank = Rank(0, plan, omni.family, model, device=_device(subject))
    batch = omni.batches[0]
    rank.reduce(rank.step(omni.source(batch), batch, make_step_plan(plan, batch, 0)))
    return {name: p.grad.clone() for name, p in rank.names.items() if p.grad is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--part", action="append", choices=[*PARTS], help="default: all, in this order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to see whether all of this runs")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    args.out.mkdir(parents=True, exist_ok=True)
    device, end_s = torch.device(args.device), time.monotonic() + 60 * args.minutes
    subject = tiny(device, args.out) if args.tiny else released(device, args.out)
    (args.out / "circumstances.json").write_text(json.dumps(circumstances(device), indent=1))
    chosen = args.part or [*PARTS]
    failed = [name for name in chosen if not run_part(name, chosen, subject, end_s, PARTS)]
    if failed:
        print(f"parts that failed: {', '.join(failed)}; errors are in {args.out}/PART.jsonl", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
