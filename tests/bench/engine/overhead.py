"""What the engine costs beside the modules it runs: every call that leaves engine code is timed, the rest is its own.

`torch.distributed` and autograd are called through their modules, so a ledger can stand in front of them; only the
outermost of nested calls is counted. The same modules in a bare loop of one process say what they cost alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dflop.models.build import EncoderStage, LlmStage
from dflop.parallel.topology import seat_of
from dflop.records import LLM, Plan, StepPlan
from dflop.train.feed import Feed, MicrobatchInput
from dflop.train.stages import make_stages
from tests.bench.engine.contenders import EngineRank
from tests.bench.engine.samples import Workload
from tests.bench.schedule.real_ranks import prepare_process
from tests.train.synthetic import make_inline_plan

MODULES, RECEIVE, SEND, COPIES = "modules", "receive", "send", "copies"
COPYING = ("index_select", "index_copy_", "to", "contiguous")


@dataclass
class Ledger:
    """Wall and thread CPU seconds, and calls, by kind of call."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    _is_inside: bool = False

    def wrap(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, noted under a kind unless it is made by one that is noted."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            self._is_inside = True
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._is_inside = False
                self.wall_s[kind] = self.wall_s.get(kind, 0.0) + time.perf_counter() - wall_s
                self.cpu_s[kind] = self.cpu_s.get(kind, 0.0) + time.thread_time() - cpu_s
                self.num_calls[kind] = self.num_calls.get(kind, 0) + 1

        return noted

    @contextmanager
    def watching(self, rank: EngineRank) -> Iterator[None]:
        """Note what the engine calls."""

        def isend(*args: Any, **kwargs: Any) -> Any:
            return _Work(self.wrap(SEND, sent(*args, **kwargs).wait))

        sent = self.wrap(SEND, dist.isend)
        with ExitStack() as patches:

            def put(place: Any, name: str, call: Callable[..., Any]) -> None:
                patches.enter_context(mock.patch.object(place, name, call))

            put(dist, "isend", isend)
            put(dist, "recv", self.wrap(RECEIVE, dist.recv))
            put(torch.autograd, "backward", self.wrap(MODULES, torch.autograd.backward))
            for stage in rank.stages:
                for name in ("forward", "embed", "loss_sum"):
                    if hasattr(stage, name):
                        put(stage, name, self.wrap(MODULES, getattr(stage, name)))
            for name in COPYING:
                put(torch.Tensor, name, self.wrap_method(COPIES, getattr(torch.Tensor, name)))
            yield

    def wrap_method(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """As `wrap`, for one that is looked up on the class."""
        noted = self.wrap(kind, method)
        return lambda tensor, *args, **kwargs: noted(tensor, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Work:
    """A send under way."""

    wait: Callable[[], Any]


@dataclass(frozen=True)
class Step:
    """Forward and backward of one step in one process; seconds of this thread by kind of call."""

    num_microbatches: int
    step_s: float
    step_cpu_s: float
    process_cpu_s: float
    """Of all threads, those of gloo among them."""
    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    num_calls: dict[str, int]


@dataclass(frozen=True)
class Split:
    """One process of the split plan."""

    steps: list[Step]
    bare_cpu_s: list[float]
    """Process CPU seconds of the same microbatches in a bare loop, per step; of rank 0."""


def measure(
    rank: int, folder: Path, workload: Workload, plan: Plan, step_plans: tuple[StepPlan, ...], num_rounds: int
) -> Split:
    """Steps of the engine, noted, then the bare loop on rank 0 while the other waits."""
    prepare_process(rank)
    engine, steps = EngineRank(workload, plan, step_plans), []
    for of_round in range(num_rounds + 1):
        for index in range(len(step_plans)):
            dist.barrier()
            step = _noted(engine, index)
            engine.optimizer.zero_grad()
            if of_round:
                steps.append(step)
    bare_s = _bare_loop(workload, plan, step_plans, num_rounds) if rank == 0 else []
    dist.barrier()
    return Split(steps, bare_s)


def _noted(engine: EngineRank, index: int) -> Step:
    ledger = Ledger()
    with ledger.watching(engine):
        begun = time.perf_counter(), time.thread_time(), time.process_time()
        trace = engine.run(index)
        ended = time.perf_counter(), time.thread_time(), time.process_time()
    step_s, step_cpu_s, process_cpu_s = (b - a for a, b in zip(begun, ended, strict=True))
    return Step(
        len(trace.timings), step_s, step_cpu_s, process_cpu_s, ledger.wall_s, ledger.cpu_s, ledger.num_calls
    )  # fmt: skip


def _bare_loop(workload: Workload, plan: Plan, step_plans: tuple[StepPlan, ...], num_rounds: int) -> list[float]:
    """CPU seconds of each counted step."""
    depth = {m.module: sum(m.layers_per_stage) for m in plan.modules}
    alone = make_inline_plan([depth], dp=1, num_microbatches=plan.num_microbatches)
    seat = seat_of(alone, 0)
    (encoder, llm), _ = make_stages(workload.model(), workload.family, seat, None)
    assert isinstance(encoder, EncoderStage)
    assert isinstance(llm, LlmStage)
    feed, seconds = Feed(workload.source, workload.family, alone, seat, llm), []
    prepared = [feed.prepare(p).microbatches for p in step_plans]
    for of_round in range(num_rounds + 1):
        for step_plan, microbatches in zip(step_plans, prepared, strict=True):
            since = time.process_time()
            for given in microbatches:
                if given is not None:
                    (_loss(encoder, llm, given) / step_plan.num_supervised_tokens).backward()
            if of_round:
                seconds.append(time.process_time() - since)
            for stage in (encoder, llm):
                stage.zero_grad(set_to_none=True)
    return seconds


def _loss(encoder: EncoderStage, llm: LlmStage, given: MicrobatchInput) -> torch.Tensor:
    assert given.llm is not None
    rows, where = [], []
    for module, item in given.encoders.items():
        rows, where = [encoder(item.data, item.sizes)], [given.llm.own_rows[module]]
    hidden = llm.embed(given.llm.input_ids, rows, where)
    hidden = llm(hidden, given.llm.position_ids, given.llm.cu_seqlens)
    return llm.loss_sum(hidden, given.llm.loss_where, given.llm.loss_targets)


@dataclass(frozen=True)
class Overhead:
    """Per microbatch of one process of the split plan: CPU seconds of the thread that trains, medians over steps.

    Waiting for a message takes none, and neither does waiting for a core.
    """

    module: str
    modules_s: float
    bookkeeping_s: float
    """Sends and receives."""
    copies_s: float
    python_s: float
    """The rest of the engine: what stands between two calls."""
    num_messages: float
    """Sent and received."""

    @property
    def overhead_s(self) -> float:
        return self.bookkeeping_s + self.copies_s + self.python_s

    @property
    def overhead_frac(self) -> float:
        """Of the module's own seconds."""
        return self.overhead_s / self.modules_s


def overhead(module: str, steps: list[Step]) -> Overhead:
    """Of the process that runs a module, over its counted steps."""

    def per_microbatch(value: Callable[[Step], float]) -> float:
        return statistics.median(value(s) / s.num_microbatches for s in steps)

    return Overhead(
        module=module,
        modules_s=per_microbatch(lambda s: s.cpu_s.get(MODULES, 0.0)),
        bookkeeping_s=per_microbatch(lambda s: s.cpu_s.get(SEND, 0.0) + s.cpu_s.get(RECEIVE, 0.0)),
        copies_s=per_microbatch(lambda s: s.cpu_s.get(COPIES, 0.0)),
        python_s=per_microbatch(lambda s: s.step_cpu_s - sum(s.cpu_s.values())),
        num_messages=per_microbatch(lambda s: s.num_calls.get(RECEIVE, 0) + s.num_calls.get(SEND, 0) / 2),
    )


MODULE_OF_RANK = ("vision", LLM)
