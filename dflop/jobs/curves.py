"""Curves of a job in the trackers a person asked for: TensorBoard, Weights & Biases, MLflow; each package is optional.

Only rank 0 writes them. A compute node often has no way out, so all three write into the run directory unless the
tracker's own environment variables (`WANDB_MODE`, `MLFLOW_TRACKING_URI`) name a server. Clients of a server that is
away retry for minutes, so each tracker has a thread, and what a job waits for it at its end has a bound.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dflop.config import Config
from dflop.errors import ConfigError
from dflop.run.messages import say
from dflop.units import seconds

_Point = tuple[int, Mapping[str, float], float]
"""Step, values by the names of curves, in which `/` groups them, and Unix time."""
Tracker = tuple[Callable[[int, Mapping[str, float], float], None], Callable[[], None]]
"""What appends a point to every curve, and what writes what is left in the end."""

PATIENCE_S = 300.0
"""How long a tracker may take for one point, or to open, before it is dropped: W&B gives up after 90 s by itself."""
CLOSE_S = 10.0
"""How long the end of a job waits for all its trackers."""
MAX_WAITING = 1000
"""Points that may wait for a tracker."""


def _tensorboard(folder: Path, run_id: str, first_step: int) -> Tracker:
    """Event files, written by a thread of TensorBoard's; points of an earlier start from `first_step` on are hidden."""
    # Seconds to import, and only for those who asked for it.
    from torch.utils.tensorboard import SummaryWriter

    mode = run_id.partition("/")[2] or "train"
    writer = SummaryWriter(str(folder / mode), purge_step=first_step)

    def add(step: int, values: Mapping[str, float], at_s: float) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step, walltime=at_s)

    return add, writer.close


def _wandb(folder: Path, run_id: str, _first_step: int) -> Tracker:
    """Steps are a metric, since those of W&B itself may not go back, as they do after a restart from a checkpoint."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)  # W&B would write to /tmp instead
    settings = wandb.Settings(console="off", silent=True)
    if "WANDB_MODE" not in os.environ:
        settings.mode = "offline"
    name, project = run_id.replace("/", "-"), os.environ.get("WANDB_PROJECT", "dflop")
    run = wandb.init(project=project, id=name, name=name, dir=str(folder), resume="allow", settings=settings)
    run.define_metric("*", step_metric="step")

    def add(step: int, values: Mapping[str, float], at_s: float) -> None:
        run.log({**values, "step": step, "observed_at_s": at_s})

    def close() -> None:
        run.finish()
        wandb.teardown()  # waits for W&B's process, which `finish` does not

    return add, close


def _mlflow(folder: Path, run_id: str, _first_step: int) -> Tracker:
    """A run of the experiment `MLFLOW_EXPERIMENT_NAME`; every start of a job continues the run that has its name."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    folder.mkdir(parents=True, exist_ok=True)
    here = f"sqlite:///{folder.resolve()}/mlflow.db"
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dflop")
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known is not None else client.create_experiment(name)
    found = client.search_runs([experiment], f"attributes.run_name = '{run_id}'", max_results=1)
    run = (found[0] if found else client.create_run(experiment, run_name=run_id)).info.run_id
    client.update_run(run, status="RUNNING")

    def add(step: int, values: Mapping[str, float], at_s: float) -> None:
        points = [Metric(name, value, round(at_s * 1000), step) for name, value in values.items()]
        client.log_batch(run, metrics=points)

    return add, lambda: client.set_terminated(run)


TRACKERS: Mapping[str, Callable[[Path, str, int], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
"""By the name of their package: what writes into a folder, under a run's id, from a step on."""


def check_trackers(config: Config, where: str) -> None:
    """Refuse to start what could not write its curves.

    Raises:
        ConfigError: a package that `train.report_to` asks for is not there; `where` is named.
    """
    for name in config.train.report_to:
        if importlib.util.find_spec(name) is None:
            hint = f"install `dflop[{name}]` where ranks run, or remove `{name}` from `train.report_to`"
            raise ConfigError(f"{name} is not installed here", where=where, hint=hint)


class Curves:
    """Hands points to every tracker, each in a thread; one that fails, or does not answer, is dropped with a line."""

    def __init__(
        self, names: Sequence[str], folder: Path, run_id: str, first_step: int, *, patience_s: float = PATIENCE_S,
        close_s: float = CLOSE_S,
    ) -> None:  # fmt: skip
        self._close_s = close_s
        self._feeds = [
            _Feed(name, functools.partial(TRACKERS[name], folder / name, run_id, first_step), patience_s)
            for name in names
        ]

    @property
    def has_dropped(self) -> bool:
        """Whether a tracker was dropped: its client may keep the interpreter from ending."""
        return any(feed.is_dropped for feed in self._feeds)

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Append one point to every curve at a Unix time; `/` in their names groups them. Returns at once."""
        for feed in self._feeds:
            feed.put((step, values, at_s))

    def close(self) -> None:
        """Let trackers write what is left; returns after at most the bound."""
        for feed in self._feeds:
            feed.put(None)
        end_s = time.monotonic() + self._close_s
        for feed in self._feeds:
            feed.join(max(end_s - time.monotonic(), 0.0))


class _Feed:
    """The thread that opens, feeds and closes one tracker."""

    def __init__(self, name: str, open_it: Callable[[], Tracker], patience_s: float) -> None:
        self._name, self._open_it, self._patience_s = name, open_it, patience_s
        self._points: queue.Queue[_Point | None] = queue.Queue(MAX_WAITING)
        self._asked_at_s = time.monotonic()
        """When the tracker was asked for what it is doing; infinity while it has nothing to do."""
        self.is_dropped = False
        self._thread = threading.Thread(target=self._run, name=f"curves-{name}", daemon=True)
        self._thread.start()

    def put(self, point: _Point | None) -> None:
        """Queue a point, or the end of them; returns at once."""
        if (waited_s := time.monotonic() - self._asked_at_s) > self._patience_s:
            self._drop(f"no answer for {seconds(waited_s)}")
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._drop(f"{MAX_WAITING} points wait for it")

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread; a tracker that needs longer is dropped."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._drop("no answer at the end of the job, its last points may be missing")

    def _run(self) -> None:
        try:
            add, close = self._open_it()
            while (point := self._next()) is not None:
                add(*point)
            if not self.is_dropped:
                close()
        except Exception as error:  # whatever a tracker raises must not end the training
            self._drop(str(error))

    def _next(self) -> _Point | None:
        self._asked_at_s = math.inf
        point = None if self.is_dropped else self._points.get()
        self._asked_at_s = time.monotonic()
        return point

    def _drop(self, reason: str) -> None:
        if not self.is_dropped:
            self.is_dropped = True
            say(f"{self._name} gets no more curves of this job, training continues: {reason}")
