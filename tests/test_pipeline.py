"""The main job end to end: broken samples, a rank killed midway under `dflop run`, the run taken up by `dflop train`.

`dflop train` needs no Prefect server: each costs 10 to 20 s of processor time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflop.data.demo import make_demo_dataset
from dflop.launch import Journal
from dflop.run.directory import RunDir
from dflop.store import console
from dflop.train.manifest import read_latest
from tests.jobs.training import NARROW_OMNI
from tests.launch.helpers import live

NUM_STEPS, BATCH_SIZE = 9, 8

pytestmark = [pytest.mark.budget(180, "the one whole run"), pytest.mark.timeout(420)]


def make_dataset(folder: Path) -> None:
    """48 healthy demo samples, one whose image is missing and one whose image is cut short behind a sound header."""
    make_demo_dataset(folder, 48)
    media_root, annotations = folder / "media", folder / "annotations.jsonl"
    photo = max(media_root.rglob("*.jpg"), key=lambda p: p.stat().st_size)
    (media_root / "cut.jpg").write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    with open(annotations, "a") as f:
        for name in ("missing", "cut"):
            turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A picture."}]
            f.write(json.dumps({"id": name, "image": f"{name}.jpg", "conversations": turns}) + "\n")


def write_config(folder: Path) -> Path:
    config = {
        "name": "e2e",
        "model": str(NARROW_OMNI),
        "cluster": {"name": "here", "backend": "local", "num_processes_per_node": 4, "memory_per_process_gib": 3},
        "dataset": {
            "annotations": str(folder / "data" / "annotations.jsonl"),
            "media_root": str(folder / "data" / "media"),
            "tokenizer": str(folder / "data" / "tokenizer.json"),
        },
        "store": str(folder / "store"),
        "runs": str(folder / "runs"),
        "data_profile": {"num_shards": 2, "max_bad_frac": 0.05},
        "model_profile": {"budget_s": 5, "num_repeats": 1, "num_probes": 8},
        "plan": {"global_batch_size": BATCH_SIZE, "microbatch_choices": [2, 4], "num_scenarios": 2, "top": 4},
        "train": {"num_steps": NUM_STEPS, "checkpoint_every": 2, "timeout_s": 60},
        "compare": {"num_batches": 1, "num_repeats": 1},
    }
    path = folder / "e2e.yaml"
    path.write_text(json.dumps(config))
    return path


class Cli:
    """A command that drives; its output goes to a file, so that nobody has to drain a pipe."""

    def __init__(self, command: str, config: Path) -> None:
        self.log = config.parent / f"{command}.log"
        env = {**os.environ, "PREFECT_HOME": str(config.parent / "prefect")}
        words = [sys.executable, "-m", "dflop.cli", command, str(config)]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(words, cwd=config.parent, env=env, stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def end(self, limit_s: float) -> int:
        return self.process.wait(limit_s)

    def wait_for(self, condition, what: str, limit_s: float = 240):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            time.sleep(0.1)
        return pytest.fail(f"no {what} after {limit_s:g} s:\n{self.output}")

    def stop(self) -> None:
        """Interrupt, which cancels the run's jobs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()


@pytest.fixture
def start():
    """Starts a command; whatever a failing test leaves running is stopped."""
    started: list[Cli] = []

    def one(command: str, config: Path) -> Cli:
        started.append(Cli(command, config))
        return started[-1]

    yield one
    for cli in started:
        cli.stop()


def kill_a_rank(run: RunDir) -> None:
    handle = live(Journal(run.path, run.run_id), f"{run.run_id}/train")
    assert handle is not None
    os.kill(int(handle.path("1.pid").read_text().split()[0]), signal.SIGKILL)


def rows(store: Path, sql: str) -> list[tuple]:
    return console.query(store, sql)[1]


def test_run_survives_bad_samples_and_a_killed_rank(tmp_path, start):
    make_dataset(tmp_path / "data")
    config, store = write_config(tmp_path), tmp_path / "store"

    first = start("run", config)
    run = RunDir(first.wait_for(lambda: next((tmp_path / "runs").glob("e2e-*"), None), "run directory"))
    first.wait_for(lambda: (read_latest(run.checkpoints) or {}).get("next_step", 0) >= 2, "checkpoint")
    kill_a_rank(run)
    assert first.end(120) == 5, first.output
    assert "rank 1" in first.output
    assert "signal 9" in first.output
    saved = read_latest(run.checkpoints)["next_step"]
    assert 2 <= saved < NUM_STEPS
    num_measured = rows(store, "select count(*) from measurement")

    second = start("train", config)
    assert second.end(300) == 0, second.output
    output = second.output
    assert output.count(", reused") == 2, output
    assert "resuming run" in output

    assert [p.name for p in (tmp_path / "runs").glob("e2e-*")] == [run.run_id]
    assert rows(store, "select count(*) from measurement") == num_measured
    resumed = rows(
        store, f"select min(step), max(step) from step_observation where run_id = '{run.run_id}' and attempt = 2"
    )
    assert resumed == [(saved, NUM_STEPS - 1)]
    steps = rows(store, f"select distinct step from step_observation where run_id = '{run.run_id}' order by step")
    assert {s for (s,) in steps} >= set(range(saved, NUM_STEPS))

    # Nothing lost: the first epoch trains every profiled sample exactly once, and every other row has its reason.
    epoch = -(-49 // BATCH_SIZE)
    trained = rows(
        store,
        f"select unnest(sample_index) from step_plan where run_id = '{run.run_id}' and step < {epoch} "
        "qualify row_number() over (partition by step order by _producer desc) = 1",
    )
    profiled = rows(store, "select sample_index from v_sample_shape")
    assert sorted(trained) == sorted(profiled)
    quarantined = rows(store, "select distinct sample_id, phase from quarantined_sample order by sample_id")
    assert quarantined == [("cut", "train"), ("missing", "profile")]
    assert len(profiled) + 1 == 50

    (state,) = rows(store, "select state, num_steps, last_loss < first_loss from v_run_summary")
    assert state[0] == "done"
    assert state[2]
    assert run.report_file.stat().st_size > 10_000
    assert 'dflop sql "select * from v_run_summary"' in output
