"""Curves of a job in the trackers a person asked for: TensorBoard, Weights & Biases, MLflow; each package is optional.

Only rank 0 writes them. A compute node often has no way out, so all three write into the run directory unless the
tracker's own environment variables (`WANDB_MODE`, `MLFLOW_TRACKING_URI`) name a server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dflop.config import Config
from dflop.errors import ConfigError


class Tracker(Protocol):
    """What keeps curves."""

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Append one point to every curve at a Unix time; `/` in their names groups them."""

    def close(self) -> None:
        """Write what is left."""


class _TensorBoard:
    """Event files, written by a thread of TensorBoard's; points of an earlier start from `first_step` on are hidden."""

    def __init__(self, folder: Path, run_id: str, first_step: int) -> None:
        # Seconds to import, and only for those who asked for it.
        from torch.utils.tensorboard import SummaryWriter

        mode = run_id.partition("/")[2] or "train"
        self._writer = SummaryWriter(str(folder / mode), purge_step=first_step)

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at_s)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Steps are a metric, since those of W&B itself may not go back, as they do after a restart from a checkpoint."""

    def __init__(self, folder: Path, run_id: str, first_step: int) -> None:
        import wandb

        self._flush = wandb.teardown
        folder.mkdir(parents=True, exist_ok=True)  # W&B would write to /tmp instead
        settings = wandb.Settings(console="off", silent=True)
        if "WANDB_MODE" not in os.environ:
            settings.mode = "offline"
        name, project = run_id.replace("/", "-"), os.environ.get("WANDB_PROJECT", "dflop")
        self._run = wandb.init(
            project=project, id=name, name=name, dir=str(folder), resume="allow", settings=settings
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        self._run.log({**values, "step": step, "observed_at_s": at_s})

    def close(self) -> None:
        self._run.finish()
        self._flush()  # waits for W&B's process, which `finish` does not


class _MLflow:
    """A run of the experiment `MLFLOW_EXPERIMENT_NAME`; every start of a job continues the run that has its name."""

    def __init__(self, folder: Path, run_id: str, first_step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        folder.mkdir(parents=True, exist_ok=True)
        here = f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dflop")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"attributes.run_name = '{run_id}'", max_results=1)
        run = found[0] if found else self._client.create_run(experiment, run_name=run_id)
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._flush: Callable[[], object] = lambda: None

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        points = [self._metric(name, value, round(at_s * 1000), step) for name, value in values.items()]
        if (sending := self._client.log_batch(self._id, metrics=points, synchronous=False)) is not None:
            self._flush = sending.wait

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._id)


TRACKERS: Mapping[str, Callable[[Path, str, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
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
    """Sends points to every tracker; one that fails is dropped with a line on stderr, and training continues."""

    def __init__(self, names: Sequence[str], folder: Path, run_id: str, first_step: int) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._dropped_on_error(name):
                self._open[name] = TRACKERS[name](folder / name, run_id, first_step)

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Append one point to every curve at a Unix time; `/` in their names groups them."""
        for name, tracker in list(self._open.items()):
            with self._dropped_on_error(name):
                tracker.add(step, values, at_s)

    def close(self) -> None:
        """Write what is left; nothing can be added then."""
        for name, tracker in list(self._open.items()):
            with self._dropped_on_error(name):
                tracker.close()
        self._open.clear()

    @contextlib.contextmanager
    def _dropped_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker raises must not end the training
            self._open.pop(name, None)
            print(f"{name} gets no more curves of this job, training continues: {error}", file=sys.stderr, flush=True)
