"""What a rank says of its steps: rows for the store, curves for trackers, lines for people.

Called by the thread that trains, between two steps; whatever touches a disk happens in threads behind it. What concerns
the whole job is told by rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from dflop.config import Config
from dflop.cost.flops import FlopCounter, peak_flops_per_s
from dflop.jobs.curves import Curves
from dflop.jobs.sample_source import DatasetSource
from dflop.jobs.spool_writer import SpoolThread
from dflop.models.family import Family
from dflop.models.generic.experts import RoutedTokens
from dflop.parallel.topology import Seat
from dflop.profile.hardware import hardware_name
from dflop.records import (
    BUSY_RATIO,
    LLM,
    ROUTERS,
    ExpertLoad,
    GradNorm,
    RankMemory,
    RankSpan,
    SourceLoss,
    StepFlops,
    StepObservation,
    StepPlan,
)
from dflop.run.batches import QUICK, GlobalBatches, StepSpec
from dflop.run.directory import RunDir
from dflop.train.router_loss import RouterLoss
from dflop.train.step_trace import Span
from dflop.units import count, percent, seconds

MEMORY_EVERY_STEPS = 20
"""How often a rank looks at the most memory it has held, and at its end, and at what its layers routed where."""


class Speed(NamedTuple):
    """How fast a step was, as rank 0 saw it."""

    flops: StepFlops
    tokens_per_s: float
    """Tokens of the global batch through the LLM, per second."""
    mfu_frac: float
    """NaN where the peak of the devices is not known."""


class SpeedCounter:
    """Knows what is in a global batch, what it asks of the model and what the devices could do.

    The family has the tokenizer's vocabulary; `frozen` is what does not train, in the job's stage of training.
    """

    def __init__(
        self, config: Config, family: Family, batches: GlobalBatches, steps: Sequence[StepSpec], num_devices: float,
        frozen: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._batches, self._steps = batches, steps
        adapted = config.train.lora.targets if config.train.lora is not None else ()
        self._counter = FlopCounter(family.specs(), frozen, adapted)
        hardware = hardware_name(config.cluster.device, config.cluster.hardware)
        self._peak_flops_per_s = num_devices * peak_flops_per_s(hardware, config.model.dtype)

    def of(self, seen: StepObservation) -> Speed:
        """Speed of a step; takes microseconds per sample of its global batch."""
        batch = self._batches.at(self._steps[seen.step].batch_step)
        flops = StepFlops(seen.run_id, seen.attempt, seen.step, self._counter.count(batch), self._peak_flops_per_s)
        num_tokens = sum(shape.num_llm_tokens for shape in batch)
        mfu_frac = flops.model_flops / (flops.peak_flops_per_s * seen.step_s)
        return Speed(flops, num_tokens / seen.step_s, mfu_frac)


class Telemetry:
    """Everything that is told of one rank's steps, under the id of the run or of its comparison.

    `peak_memory` is the most memory the rank has held by kind, bytes; None: nobody looks. `has_own_core`: as
    `Plan.has_own_cores` says.
    """

    def __init__(
        self, run: RunDir, config: Config, seat: Seat, run_id: str, attempt: int, spool: SpoolThread,
        peak_memory: Callable[[], Mapping[str, int]] | None = None, has_own_core: bool = False,
    ) -> None:  # fmt: skip
        self._peak_memory, self._step = peak_memory, -1
        self._peak_bytes: dict[str, int] = {}
        self._run, self._report_to, self._seat = run, config.train.report_to, seat
        self._run_id, self._attempt, self._spool = run_id, attempt, spool
        self._has_own_core = has_own_core
        self.speed: SpeedCounter | None = None
        """On rank 0, once the model is known: tells how fast steps are."""
        self.curves: Curves | None = None
        self.routed: RoutedTokens | None = None
        """Once the model is known, of its layers with experts."""
        self._last_routed = -1

    def observed(self, seen: StepObservation) -> str:
        """Tell of a step; returns the line about it, on rank 0."""
        self._spool.put(seen)
        self._step = seen.step
        if seen.step % MEMORY_EVERY_STEPS == 0:
            self._tell_memory()
            self._tell_routed(seen)
        if self.speed is None:
            return ""
        speed, idle_frac = self.speed.of(seen), 1 - seen.busy_s / seen.step_s
        self._spool.put(speed.flops)
        if self._report_to:
            self._draw(seen, speed, idle_frac)
        return _line(seen, speed, idle_frac, self._has_own_core)

    def saved(self, step: int, step_plan: StepPlan) -> None:
        """Draw what balancing saves of a step by the simulator, next to the same batch in arrival order."""
        if self._report_to and step_plan.arrival_step_s > 0:
            curves = {
                "time/predicted_arrival_step_s": step_plan.arrival_step_s,
                "speed/predicted_saved_frac": 1 - step_plan.predicted_step_s / step_plan.arrival_step_s,
            }
            self._curves_from(step).add(step, curves, time.time())

    def norms(self, step: int, norm_of: Mapping[str, float]) -> None:
        """Tell of the gradient norms of the modules that train: rows of the store, and curves of several."""
        trained = {module: norm for module, norm in norm_of.items() if norm}
        for module, norm in trained.items():
            self._spool.put(GradNorm(self._run_id, self._attempt, step, module, norm))
        if self._report_to and len(trained) > 1:
            curves = {f"train/grad_norm/{module}": norm for module, norm in trained.items()}
            self._curves_from(step).add(step, curves, time.time())

    def routers(self, step: int, of: RouterLoss) -> None:
        """Report the load balancing loss of the routers, if there is one: a row of the store and a curve."""
        if of and of.num_tokens:
            now_s, counts = time.time(), (of.num_tokens, of.num_samples)
            self._spool.put(SourceLoss(self._run_id, self._attempt, step, ROUTERS, LLM, of.value, *counts, now_s))
            if self._report_to:
                self._curves_from(step).add(step, {"train/router_loss": of.value}, now_s)

    def losses(self, step: int, split: str, losses: Mapping[int, float], source: DatasetSource) -> list[SourceLoss]:
        """Tell of the summed losses of samples by source: rows of the store, and curves where there are several."""
        now_s = time.time()
        rows = [
            SourceLoss(self._run_id, self._attempt, step, split, name, *mean, now_s)
            for name, mean in means_by_source(losses, source).items()
        ]
        for row in rows:
            self._spool.put(row)
        if self._report_to and len(rows) > 1:
            self._curves_from(step).add(step, {f"{split}/loss/{row.source}": row.loss for row in rows}, now_s)
        return rows

    def validated(self, step: int, losses: Mapping[int, float], source: DatasetSource, elapsed_s: float) -> str:
        """Tell of the summed losses of samples that are held out of training; returns the line about it."""
        rows = self.losses(step, "validation", losses, source)
        num_tokens = sum(row.num_tokens for row in rows)
        mean = sum(row.loss * row.num_tokens for row in rows) / num_tokens if num_tokens else math.nan
        if self._report_to and num_tokens:
            self._curves_from(step).add(step, {"validation/loss": mean}, time.time())
        each = ", ".join(f"{row.source} {row.loss:.4f}" for row in rows)
        return f"loss {mean:.4f} over {len(losses)} samples in {seconds(elapsed_s)}" + f" ({each})" * (len(rows) > 1)

    def traced(self, step: int, spans: Sequence[Span]) -> None:
        """Leave what happened in a step in the store."""
        for span in spans:
            self._spool.put(RankSpan(*self._place(step), *span))

    def close(self) -> None:
        """Write what is left; may come twice, when a job ends in disorder."""
        self._tell_memory()
        self._peak_memory = None
        if self.curves is not None:
            self.curves.close()

    def _draw(self, seen: StepObservation, speed: Speed, idle_frac: float) -> None:
        curves = {
            **({"train/loss": seen.loss} if seen.num_supervised_tokens else {}),
            "train/grad_norm": seen.grad_norm,
            "time/step_s": seen.step_s,
            "time/predicted_step_s": seen.predicted_step_s,
            "time/data_wait_s": seen.data_wait_s,
            "speed/idle_frac": idle_frac,
            "speed/llm_tokens_per_s": speed.tokens_per_s,
            **({} if math.isnan(speed.mfu_frac) else {"speed/mfu_frac": speed.mfu_frac}),
        }
        self._curves_from(seen.step).add(seen.step, curves, seen.observed_at_s)

    def _curves_from(self, step: int) -> Curves:
        """The curves, which begin with the job's first step."""
        if self.curves is None:
            self.curves = Curves(self._report_to, self._run.path, self._run_id, step)
        return self.curves

    def _tell_memory(self) -> None:
        """Leave the most memory so far in the store, if it has become more."""
        if self._peak_memory is None or self._step < 0:
            return
        for kind, peak_bytes in self._peak_memory().items():
            if peak_bytes > self._peak_bytes.get(kind, 0):
                self._peak_bytes[kind] = peak_bytes
                self._spool.put(RankMemory(*self._place(self._step), kind, peak_bytes, time.time()))

    def _tell_routed(self, seen: StepObservation) -> None:
        """Leave in the store how many tokens went to which experts since the last time."""
        num_steps = seen.step - self._last_routed if self._last_routed >= 0 else 1
        for layer, num_tokens in self.routed.take().items() if self.routed else ():
            place = self._run_id, self._attempt, seen.step, seen.rank, seen.stage, seen.dp_rank
            self._spool.put(ExpertLoad(*place, num_steps, layer, tuple(num_tokens)))
        self._last_routed = seen.step

    def _place(self, step: int) -> tuple[str, int, int, int, str, int, int, int]:
        """How rows of a rank begin."""
        s = self._seat
        return self._run_id, self._attempt, step, s.rank, s.module, s.stage, s.dp_rank, s.tp_rank


def means_by_source(losses: Mapping[int, float], source: DatasetSource) -> dict[str, tuple[float, int, int]]:
    """By source, in order: mean loss over tokens, tokens and samples; without sources that have no token.

    Args:
        losses: Summed, by sample index.
        source: Of the samples.
    """
    found = dict[str, tuple[float, int, int]]()
    for index in sorted(losses):
        name, num_tokens = source.source(index), source.shape(index).num_supervised_tokens
        loss, tokens, samples = found.get(name, (0.0, 0, 0))
        found[name] = loss + losses[index], tokens + num_tokens, samples + 1
    return {name: (loss / tokens, tokens, samples) for name, (loss, tokens, samples) in found.items() if tokens}


def _line(seen: StepObservation, speed: Speed, idle_frac: float, has_own_core: bool) -> str:
    mfu = "" if math.isnan(speed.mfu_frac) else f"  MFU {percent(speed.mfu_frac)}"
    loss = f"loss {seen.loss:.4f}" if seen.num_supervised_tokens else "no loss, all samples were skipped"
    schedule = "fallback schedule" if seen.policy == QUICK else seen.policy
    busy = ""
    if has_own_core and seen.wall_to_compute > BUSY_RATIO:
        share = f"processor time {percent(1 / seen.wall_to_compute)} of wall"
        busy = f"  compute {seconds(seen.compute_s)}: other programs used the cores ({share})"
    return (
        f"{loss}  {seconds(seen.step_s)} (predicted {seconds(seen.predicted_step_s)})  {schedule}  "
        f"{count(round(speed.tokens_per_s))} tokens/s  rank 0 idle {percent(idle_frac)}{mfu}{busy}"
    )
