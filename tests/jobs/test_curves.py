"""What trackers hold of a job that was started twice, and what happens when one of them fails."""

from __future__ import annotations

import math
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflop.errors import ConfigError
from dflop.jobs.curves import MAX_WAITING, TRACKERS, Curves, Tracker, check_trackers
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
        curves = Curves([name], tmp_path, "run-1", steps[0], close_s=60)
        for step in steps:
            curves.add(step, {"train/loss": LOSSES[step] + error * (step == RESUMED_AT)}, at_s + step)
        curves.close()
    assert read(tmp_path) == LOSSES


class Fake:
    """A tracker that fails, or hangs until it is let go, in one of its three calls."""

    def __init__(self, where: str, act: Callable[[], None]) -> None:
        self.where, self.act, self.calls = where, act, list[str]()

    def __call__(self, folder: Path, run_id: str, first_step: int) -> Tracker:
        self._at("open")
        return self.add, self.close

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        self._at("add")

    def close(self) -> None:
        self._at("close")

    def _at(self, call: str) -> None:
        self.calls.append(call)
        if call == self.where:
            self.act()


def fails() -> None:
    raise RuntimeError("the server is gone")


class Hang:
    """What a server that accepts and never answers does to its client."""

    def __init__(self) -> None:
        self.has_begun, self._is_over = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        self._is_over.wait()

    def end(self) -> None:
        self._is_over.set()
        for thread in threading.enumerate():
            if thread.name == "curves-wandb":
                thread.join()


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.end()


DROPPED = "wandb gets no more curves of this job, training continues: "
CALLS = {"open": ["open"], "add": ["open", "add"], "close": ["open", *["add"] * len(LOSSES), "close"]}


@pytest.mark.parametrize("where", CALLS)
def test_a_tracker_that_fails_gets_no_more_and_the_others_do(tmp_path, monkeypatch, capsys, where):
    fake = Fake(where, fails)
    monkeypatch.setitem(TRACKERS, "wandb", fake)
    curves = Curves(["wandb", "tensorboard"], tmp_path, "run-1", 0, close_s=60)
    for step, loss in LOSSES.items():
        curves.add(step, {"train/loss": loss}, 1e9 + step)
    curves.close()
    assert (of_tensorboard(tmp_path), fake.calls) == (LOSSES, CALLS[where])
    assert capsys.readouterr().err == DROPPED + "the server is gone\n"
    assert curves.has_dropped


@pytest.mark.parametrize("where", CALLS)
def test_a_tracker_that_hangs_holds_up_neither_steps_nor_the_end(tmp_path, monkeypatch, capsys, hang, where):
    fake = Fake(where, hang)
    monkeypatch.setitem(TRACKERS, "wandb", fake)
    curves = Curves(["wandb"], tmp_path, "run-1", 0, close_s=0)
    for step in LOSSES:
        curves.add(step, {}, 1e9)
    if where != "close":
        hang.has_begun.wait()
    curves.close()
    curves.close()
    assert capsys.readouterr().err == DROPPED + "no answer at the end of the job, its last points may be missing\n"
    hang.end()
    assert "close" not in fake.calls or where == "close", "a tracker that was dropped gets nothing"
    assert capsys.readouterr().err == ""


def test_a_tracker_that_hangs_is_dropped_when_patience_or_room_ends(tmp_path, monkeypatch, capsys, hang):
    monkeypatch.setitem(TRACKERS, "wandb", Fake("add", hang))
    patient, impatient = (
        Curves(["wandb"], tmp_path, "run-1", 0, patience_s=patience_s, close_s=0) for patience_s in (math.inf, 0)
    )
    patient.add(0, {}, 1e9)
    hang.has_begun.wait()
    for step in range(1, MAX_WAITING + 1):
        patient.add(step, {}, 1e9)
    assert not patient.has_dropped
    patient.add(MAX_WAITING + 1, {}, 1e9)
    assert capsys.readouterr().err == f"{DROPPED}{MAX_WAITING} points wait for it\n"
    hang.has_begun.clear()
    impatient.add(0, {}, 1e9)
    hang.has_begun.wait()
    impatient.add(1, {}, 1e9)
    assert capsys.readouterr().err.startswith(DROPPED + "no answer for ")


def test_a_server_that_accepts_and_never_answers_keeps_nobody(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        curves = Curves(["mlflow"], tmp_path, "run-1", 0, close_s=0)
        with server.accept()[0] as client:
            client.recv(1)
            curves.add(0, {"train/loss": 1.0}, 1e9)
            curves.close()
            assert capsys.readouterr().err.startswith("mlflow gets no more curves of this job, training continues: ")


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    config = make_config(tmp_path, "train.report_to=[tensorboard,mlflow]")
    with pytest.raises(ConfigError, match="mlflow is not installed here") as refused:
        check_trackers(config, "run.yaml:7: train.report_to")
    assert (refused.value.where, refused.value.hint) == (
        "run.yaml:7: train.report_to",
        "install `dflop[mlflow]` where ranks run, or remove `mlflow` from `train.report_to`",
    )
