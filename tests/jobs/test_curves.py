"""What trackers hold of a job that was started twice, and what happens when one of them fails."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflop.errors import ConfigError
from dflop.jobs.curves import TRACKERS, Curves, check_trackers
from tests.jobs.configs import make_config

LOSSES = {0: 8.5, 1: 7.0, 2: 6.25, 3: 6.0}
RESUMED_AT = 2
"""Step of the newest checkpoint: the first start's point of it is drawn again."""


def of_tensorboard(folder: Path) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard" / "train"))
    events.Reload()
    return {e.step: e.value for e in events.Scalars("train/loss")}


def of_wandb(folder: Path) -> dict[int, float]:
    """Records of W&B's log, LevelDB's format: behind 7 bytes, each with 4 bytes of CRC, 2 of length and 1 of kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for path in sorted(folder.glob("wandb/wandb/offline-run-*/run-*.wandb")):
        content, at = path.read_bytes(), 7
        while at < len(content):
            length, kind = struct.unpack_from("<HB", content, at + 4)
            assert kind == 1, "a whole record; the file is less than a block"
            record = Record.FromString(content[at + 7 : at + 7 + length])
            row = {item.nested_key[0]: float(item.value_json) for item in record.history.item}
            found |= {int(row["step"]): row["train/loss"]} if row else {}
            at += 7 + length
    return found


def of_mlflow(folder: Path) -> dict[int, float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert (run.info.run_name, run.info.status) == ("run-1", "FINISHED")
    points = client.get_metric_history(run.info.run_id, "train/loss")
    return {m.step: m.value for m in sorted(points, key=lambda m: m.timestamp)}


@pytest.mark.parametrize(
    ("name", "read"), [("tensorboard", of_tensorboard), ("wandb", of_wandb), ("mlflow", of_mlflow)]
)
def test_a_job_that_is_started_again_goes_on_with_its_curves(tmp_path, monkeypatch, name, read):
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    for at_s, steps, error in ((1e9, (0, 1, 2), 1.0), (2e9, (2, 3), 0.0)):
        curves = Curves([name], tmp_path, "run-1", steps[0])
        for step in steps:
            curves.add(step, {"train/loss": LOSSES[step] + error * (step == RESUMED_AT)}, at_s + step)
        curves.close()
    assert read(tmp_path) == LOSSES


def test_a_tracker_that_fails_gets_no_more_and_the_others_do(tmp_path, monkeypatch, capsys):
    class Failing:
        def __init__(self, folder: Path, run_id: str, first_step: int) -> None:
            pass

        def add(self, step, values, at_s) -> None:
            raise RuntimeError("the server is gone")

        def close(self) -> None:
            raise AssertionError("it was dropped")

    monkeypatch.setitem(TRACKERS, "wandb", Failing)
    curves = Curves(["wandb", "tensorboard"], tmp_path, "run-1", 0)
    for step, loss in LOSSES.items():
        curves.add(step, {"train/loss": loss}, 1e9 + step)
    curves.close()
    assert of_tensorboard(tmp_path) == LOSSES
    assert capsys.readouterr().err == "wandb gets no more curves of this job, training continues: the server is gone\n"


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    config = make_config(tmp_path, "train.report_to=[tensorboard,mlflow]")
    with pytest.raises(ConfigError, match="mlflow is not installed here") as refused:
        check_trackers(config, "run.yaml:7: train.report_to")
    assert (refused.value.where, refused.value.hint) == (
        "run.yaml:7: train.report_to",
        "install `dflop[mlflow]` where ranks run, or remove `mlflow` from `train.report_to`",
    )
