"""Training against its time limit: a checkpoint before it, another start, and nothing lost or repeated."""

import math
import sys
from collections import Counter
from itertools import pairwise

import pytest

from dflop.launch import JobHandle, Journal
from dflop.run.directory import RunDir
from tests.jobs.training import fresh, losses_of, run_ranks, set_config
from tests.launch.helpers import until
from tests.slurm.faults import Drivers, gets_on, observations, run_on_two_nodes, shown, slurm, strays, train_job

NUM_STOPS = 2


@pytest.fixture(scope="module")
def run(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    folder = tmp_path_factory.mktemp("limits")
    # All steps are of the warm-up: behind it the learning rate depends on how many steps there will be. It stays low,
    # for a model that knows its few samples by heart turns a rounding error into another loss.
    rate = ("train.learning_rate=0.001", "train.warmup_steps=2000")
    return run_on_two_nodes(folder, *rate, "cluster.slurm.signal_delay_s=10", "train.checkpoint_every=1000")


def test_a_limit_and_a_warning_change_no_loss_and_repeat_no_step(run, tmp_path):
    """Checkpoints are far apart: what is kept is kept by the signal, Slurm's first, then ours."""
    straight = fresh(run, tmp_path)
    drivers = Drivers(run)
    driver = drivers.start()
    try:
        handle = until(lambda: train_job(run), what="a job")
        gets_on(handle)
        slurm("scontrol", "update", f"jobid={handle.job_id}", f"timelimit={next_limit(handle)}")
        until(lambda: shown(handle.job_id, "Restarts") == "1", what="another start", limit_s=180)
        # The limit holds for every start of the job, and a busy machine needs a minute to begin.
        slurm("scontrol", "update", f"jobid={handle.job_id}", "timelimit=10")
        gets_on(handle)
        slurm("scancel", "--signal=USR2", handle.job_id)
        until(lambda: shown(handle.job_id, "Restarts") == "2", what="another start", limit_s=120)
        # Read by the start that comes now.
        set_config(run, f"train.num_steps={run.next_step() + 4}")
        driver.ends(0, 300)
    finally:
        drivers.stop()
    assert {r.job_id for r in Journal(run.path, run.run_id).records()} == {handle.job_id}
    assert f"requeued {NUM_STOPS} times" in driver.output or "requeued once" in driver.output
    stops = [tuple(map(int, line.split())) for line in handle.path("stops").read_text().splitlines()]
    assert all(reached == began for (_, reached), (began, _) in pairwise(stops))
    assert len(stops) == NUM_STOPS
    num_steps, num_ranks = run.next_step(), run.plan().num_processes
    found = observations(run)
    assert Counter((o.step, o.rank) for o in found) == {(s, r): 1 for s in range(num_steps) for r in range(num_ranks)}
    assert strays(found) == {}
    set_config(straight, f"train.num_steps={num_steps}", "cluster.backend=local")
    ended = run_ranks(straight, "dflop.jobs.train", str(straight.path), "train", limit_s=600)
    assert set(ended.codes) == {0}, "\n".join(ended.stderr)
    assert losses_of(run) == pytest.approx(losses_of(straight), rel=1e-4)
    print(f"{num_steps} steps, stopped at {[reached for _, reached in stops]}", file=sys.stderr)


def next_limit(handle: JobHandle) -> int:
    """In minutes, one if it has just begun: Slurm looks every half minute, so it warns 10 to 40 s before the limit."""
    *_, minutes, seconds = slurm("squeue", "-h", "-o", "%M", "-j", handle.job_id).split(":")
    return math.ceil((60 * int(minutes) + int(seconds) + 45) / 60)
