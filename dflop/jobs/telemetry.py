"""What a rank says of its steps: rows for the store, metrics for Prometheus, curves for trackers, lines for people.

Called by the thread that trains, between two steps; whatever touches a disk happens in threads behind it. What concerns
the whole job is told by rank 0.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflop import files
from dflop.config import Config
from dflop.cost.flops import FlopCounter, peak_flops_per_s
from dflop.jobs.curves import Curves
from dflop.jobs.spool_writer import SpoolThread
from dflop.models.family import Family
from dflop.parallel.topology import Seat
from dflop.profile.hardware import hardware_name
from dflop.records import RankMemory, RankSpan, StepFlops, StepObservation
from dflop.run.batches import QUICK, GlobalBatches, StepSpec
from dflop.run.directory import RunDir
from dflop.run.messages import say
from dflop.train.manifest import read_latest
from dflop.train.step_trace import Span
from dflop.units import count, percent, seconds

METRICS_EVERY_S = 5.0
METRICS_END_S = 5.0
"""A disk that hangs keeps no job from ending."""

METRICS: dict[str, tuple[str, str]] = {
    "dflop_step": ("gauge", "Last finished optimizer step, from 0."),
    "dflop_loss": ("gauge", "Mean loss over the supervised tokens of the global batch; NaN: no such tokens."),
    "dflop_grad_norm": ("gauge", "Norm of the gradient over the whole model, before clipping."),
    "dflop_step_seconds": ("gauge", "Duration of the last step on this rank."),
    "dflop_predicted_step_seconds": ("gauge", "Predicted forward and backward time of the last step."),
    "dflop_idle_fraction": ("gauge", "Share of the last step that this rank spent outside forward and backward."),
    "dflop_tokens_per_second": ("gauge", "LLM tokens of the global batch per second; reported by rank 0."),
    "dflop_mfu": ("gauge", "Model FLOPs utilisation of all devices in the last step; rank 0, where the peak is known."),
    "dflop_data_wait_seconds_total": ("counter", "Waits for the input of a step."),
    "dflop_schedule_wait_seconds_total": ("counter", "Waits for the plan of a step, mostly overlapped with a step."),
    "dflop_skipped_samples_total": ("counter", "Samples skipped because this rank could not decode their media."),
    "dflop_scheduler_events_total": ("counter", "Failures, restarts and delays of the scheduler; reported by rank 0."),
    "dflop_checkpoint_step": ("gauge", "Step at which the newest complete checkpoint resumes; reported by rank 0."),
}
"""Type and meaning of every metric. Counters count from the start of the process."""
SKIPPED_SAMPLES, SCHEDULER_EVENTS = "dflop_skipped_samples_total", "dflop_scheduler_events_total"
MEMORY_EVERY_STEPS = 20
"""How often a rank looks at the most memory it has held; and once more at its end."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a step was, as rank 0 saw it."""

    flops: StepFlops
    tokens_per_s: float
    """Of the global batch, through the LLM."""
    mfu_frac: float
    """NaN where the peak of the devices is not known."""

    def utilisation(self, name: str) -> dict[str, float]:
        """`mfu_frac` under a name, where it is known."""
        return {} if math.isnan(self.mfu_frac) else {name: self.mfu_frac}


class SpeedCounter:
    """Knows what is in a global batch, what it asks of the model and what the devices could do.

    The family has the tokenizer's vocabulary; `frozen` is what does not train, in the job's stage of training.
    """

    def __init__(
        self, config: Config, family: Family, batches: GlobalBatches, steps: Sequence[StepSpec], num_devices: float,
        frozen: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._batches, self._steps = batches, steps
        self._counter = FlopCounter(family.specs(), frozen)
        hardware = config.cluster.hardware
        hardware = hardware_name(config.cluster.device) if hardware == "auto" else hardware
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

    `peak_memory` is the most memory the rank has held by kind, bytes; None: nobody looks.
    """

    def __init__(
        self, run: RunDir, config: Config, seat: Seat, run_id: str, attempt: int, spool: SpoolThread,
        peak_memory: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:  # fmt: skip
        self._peak_memory, self._step = peak_memory, -1
        self._peak_bytes: dict[str, int] = {}
        self._run, self._config, self._seat = run, config, seat
        self._run_id, self._attempt, self._spool = run_id, attempt, spool
        self.speed: SpeedCounter | None = None
        """On rank 0, once the model is known: tells how fast steps are."""
        self.curves: Curves | None = None
        labels = {"run_id": run_id, "module": seat.module, "stage": str(seat.stage), "rank": str(seat.rank)}
        file = run.path / "metrics" / f"rank-{seat.rank}.prom"
        if config.train.metrics_dir is not None:  # which runs share
            file = config.train.metrics_dir / f"dflop-{run.run_id}-rank-{seat.rank}.prom"
        self._metrics = MetricsFile(file, labels, look=self._checkpoint_step)
        # Shown before they happen, so that their rate is known when they do.
        self._metrics.update({}, {SKIPPED_SAMPLES: 0.0, SCHEDULER_EVENTS: 0.0})

    def observed(self, seen: StepObservation) -> str:
        """Tell of a step; returns the line about it, on rank 0."""
        self._spool.put(seen)
        self._step = seen.step
        if seen.step % MEMORY_EVERY_STEPS == 0:
            self._tell_memory()
        speed = self.speed.of(seen) if self.speed is not None else None
        idle_frac = 1 - seen.busy_s / seen.step_s
        values = {
            "dflop_step": seen.step,
            "dflop_loss": seen.loss,
            "dflop_grad_norm": seen.grad_norm,
            "dflop_step_seconds": seen.step_s,
            "dflop_predicted_step_seconds": seen.predicted_step_s,
            "dflop_idle_fraction": idle_frac,
        }
        if speed is not None:
            self._spool.put(speed.flops)
            values |= {"dflop_tokens_per_second": speed.tokens_per_s} | speed.utilisation("dflop_mfu")
            self._draw(seen, speed, idle_frac)
        data_s, schedule_s = "dflop_data_wait_seconds_total", "dflop_schedule_wait_seconds_total"
        self._metrics.update(values, {data_s: seen.data_wait_s, schedule_s: seen.schedule_wait_s})
        return "" if speed is None else _line(seen, speed, idle_frac)

    def traced(self, step: int, spans: Sequence[Span]) -> None:
        """Leave what happened in a step in the store."""
        for span in spans:
            self._spool.put(RankSpan(*self._place(step), *span))

    def count(self, metric: str) -> None:
        """One more of `SKIPPED_SAMPLES` or `SCHEDULER_EVENTS`; by any thread."""
        self._metrics.update({}, {metric: 1})

    def close(self) -> None:
        """Write what is left; may come twice, when a job ends in disorder."""
        self._tell_memory()
        self._peak_memory = None
        self._metrics.close()
        if self.curves is not None:
            self.curves.close()

    def _draw(self, seen: StepObservation, speed: Speed, idle_frac: float) -> None:
        if not self._config.train.report_to:
            return
        if self.curves is None:
            self.curves = Curves(self._config.train.report_to, self._run.path, self._run_id, seen.step)
        curves = {
            **({"train/loss": seen.loss} if seen.num_supervised_tokens else {}),
            "train/grad_norm": seen.grad_norm,
            "time/step_s": seen.step_s,
            "time/predicted_step_s": seen.predicted_step_s,
            "time/data_wait_s": seen.data_wait_s,
            "speed/idle_frac": idle_frac,
            "speed/llm_tokens_per_s": speed.tokens_per_s,
            **speed.utilisation("speed/mfu_frac"),
        }
        self.curves.add(seen.step, curves, seen.observed_at_s)

    def _tell_memory(self) -> None:
        """Leave the most memory so far in the store, if it has become more."""
        if self._peak_memory is None or self._step < 0:
            return
        for kind, peak_bytes in self._peak_memory().items():
            if peak_bytes > self._peak_bytes.get(kind, 0):
                self._peak_bytes[kind] = peak_bytes
                self._spool.put(RankMemory(*self._place(self._step), kind, peak_bytes, time.time()))

    def _place(self, step: int) -> tuple[str, int, int, int, str, int, int, int]:
        """How rows of a rank begin."""
        s = self._seat
        return self._run_id, self._attempt, step, s.rank, s.module, s.stage, s.dp_rank, s.tp_rank

    def _checkpoint_step(self) -> dict[str, float]:
        """Asked by the thread that writes metrics."""
        latest = read_latest(self._run.checkpoints) if self._seat.rank == 0 else None
        return {"dflop_checkpoint_step": float(latest["next_step"])} if latest else {}


def _line(seen: StepObservation, speed: Speed, idle_frac: float) -> str:
    mfu = "" if math.isnan(speed.mfu_frac) else f"  MFU {percent(speed.mfu_frac)}"
    loss = f"loss {seen.loss:.4f}" if seen.num_supervised_tokens else "no loss, all samples were skipped"
    schedule = "fallback schedule" if seen.policy == QUICK else seen.policy
    return (
        f"{loss}  {seconds(seen.step_s)} (predicted {seconds(seen.predicted_step_s)})  {schedule}  "
        f"{count(round(speed.tokens_per_s))} tokens/s  rank 0 idle {percent(idle_frac)}{mfu}"
    )


class MetricsFile:
    """The metrics of one rank under its labels, in a text file that Prometheus' node exporter collects.

    A thread replaces the file as a whole when metrics have changed, at most every so often. A folder that is full, slow
    or gone costs the metrics and nothing else; that is said once. What became of a job that ended shows in the file's
    age, which the node exporter reports (`node_textfile_mtime_seconds`).

    `look` is asked by the thread before it writes, for gauges that somebody else keeps.
    """

    def __init__(
        self, path: Path, labels: Mapping[str, str], *, look: Callable[[], Mapping[str, float]] = dict,
        every_s: float = METRICS_EVERY_S,
    ) -> None:  # fmt: skip
        self._path, self._labels, self._look, self._every_s = path, dict(labels), look, every_s
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        self._has_changed, self._is_closing = threading.Event(), threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def update(self, values: Mapping[str, float], counts: Mapping[str, float] | None = None) -> None:
        """Replace gauges and add to counters, by names of `METRICS`; returns at once."""
        with self._lock:
            self._values |= values
            for name, amount in (counts or {}).items():
                self._values[name] = self._values.get(name, 0.0) + amount
        self._has_changed.set()

    def close(self) -> None:
        """Write what was told last and end the thread."""
        self._is_closing.set()
        self._has_changed.set()
        self._thread.join(METRICS_END_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._has_changed.wait()
            self._has_changed.clear()
            self._write()
            self._is_closing.wait(self._every_s)
        self._write()

    def _write(self) -> None:
        try:
            looked = self._look()
            with self._lock:
                text = render({**self._values, **looked}, self._labels)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # The collector reads every file that ends in .prom, finished or not.
            files.replace(self._path, text)
        except OSError as error:
            if not self._has_failed:
                say(f"metrics cannot be written, training continues: {error}")
            self._has_failed = True


def render(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Metrics of `METRICS` in Prometheus' text format, each with its help and type."""
    # JSON escapes what this format does, in the same way.
    text = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in labels.items())
    lines = []
    for name, value in values.items():
        kind, meaning = METRICS[name]
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name}{{{text}}} {float(value)!r}"]
    return "\n".join([*lines, ""])
