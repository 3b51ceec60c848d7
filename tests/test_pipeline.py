"""The main job end to end: broken samples, a rank killed midway under `dflop run`, the run taken up by `dflop train`.

`dflop train` needs no Prefect server: each costs 10 to 20 s of processor time.
"""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dflop.data.demo import make_demo_dataset
from dflop.launch import Journal
from dflop.run.directory import RunDir
from dflop.store import console
from tests.jobs.configs import write_sections
from tests.jobs.training import NARROW_OMNI
from tests.launch.helpers import Background, live

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


@pytest.fixture
def start():
    """Starts a command; whatever a failing test leaves running is interrupted, which cancels the run's jobs."""
    started = list[Background]()

    def one(command: str, config: Path) -> Background:
        home, log = str(config.parent / "prefect"), config.parent / f"{command}.log"
        started.append(
            Background("dflop.cli", command, str(config), log=log, cwd=config.parent, PREFECT_HOME=home)
        )  # fmt: skip
        return started[-1]

    yield one
    for cli in started:
        if cli.process.poll() is None:
            cli.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                cli.process.wait(30)
            cli.kill()


def kill_a_rank(run: RunDir) -> None:
    handle = live(Journal(run.path, run.run_id), f"{run.run_id}/train")
    assert handle is not None
    os.kill(int(handle.path("1.pid").read_text().split()[0]), signal.SIGKILL)


def rows(store: Path, sql: str) -> list[tuple]:
    return console.query(store, sql)[1]


def test_run_survives_bad_samples_and_a_killed_rank(tmp_path, start):
    make_dataset(tmp_path / "data")
    store = tmp_path / "store"
    config = write_sections(
        tmp_path, "e2e", NARROW_OMNI,
        cluster={"num_processes_per_node": 4},
        data_profile={"num_shards": 2, "max_bad_frac": 0.05},
        model_profile={"budget_s": 5, "num_repeats": 1, "num_probes": 8},
        plan={"global_batch_size": BATCH_SIZE, "microbatch_choices": [2, 4], "num_scenarios": 2, "top": 4},
        train={"num_steps": NUM_STEPS, "checkpoint_every": 2, "timeout_s": 60},
        compare={"num_batches": 1, "num_repeats": 1},
    )  # fmt: skip

    first = start("run", config)
    run = RunDir(first.shows(lambda: next((tmp_path / "runs").glob("e2e-*"), None), what="run directory"))
    first.shows(lambda: run.next_step() >= 2, what="checkpoint")
    kill_a_rank(run)
    output = first.ends(5, 120)
    assert "rank 1" in output
    assert "signal 9" in output
    saved = run.next_step()
    assert 2 <= saved < NUM_STEPS
    num_measured = rows(store, "select count(*) from measurement")

    output = start("train", config).ends(0, 300)
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
