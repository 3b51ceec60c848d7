"""What a rank is at, as a text file that Prometheus' node exporter collects: no server, no port, nobody to wait for.

The file is replaced as a whole, at most every few seconds, by a thread of its own. A folder that is full, slow or gone
costs the metrics and nothing else; that is said once. What became of a job that ended shows in the file's age, which
the node exporter reports (`node_textfile_mtime_seconds`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from dflop import files
from dflop.run.messages import say

WRITE_EVERY_S = 5.0
END_S = 5.0
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


class MetricsFile:
    """The metrics of one rank under its labels; a thread writes them when they have changed, at most every so often.

    `look` is asked by the thread before it writes, for gauges that somebody else keeps.
    """

    def __init__(
        self, path: Path, labels: Mapping[str, str], *, look: Callable[[], Mapping[str, float]] = dict,
        every_s: float = WRITE_EVERY_S,
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
        self._thread.join(END_S)

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
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    text = ",".join(f'{name}="{value}"' for name, value in escaped.items())
    lines = []
    for name, value in values.items():
        kind, meaning = METRICS[name]
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name}{{{text}}} {float(value)!r}"]
    return "\n".join([*lines, ""])
