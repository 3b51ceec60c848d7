"""The whole pipeline on four nodes: by `dflop run`, inside a job, and by a worker of a Prefect server.

The first run profiles. The other two start at once, in the same store, and find what it has measured.
"""

import contextlib
import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflop.data.demo import make_demo_dataset
from dflop.launch import Journal
from dflop.records import JobRecord
from dflop.run import lifecycle
from dflop.run.directory import RunDir, open_run
from dflop.store import console
from tests.flows.test_served import Server, ended
from tests.launch.helpers import REPO, Background, until
from tests.slurm.faults import end_of, make_environment, write_config

NEEDS_CLUSTER_ALONE = True  # one shard on each node
NUM_STEPS = 4
pytestmark = pytest.mark.lane("slurm-heart")


@dataclass(frozen=True)
class Pipelines:
    """What three drivers left: each its run, what it said, and the state of its flow run."""

    folder: Path
    runs: dict[str, RunDir]
    said: dict[str, str]
    states: dict[str, str]

    def jobs(self, name: str) -> dict[str, JobRecord]:
        """The last record of every job."""
        run = self.runs[name]
        return {record.job_key: record for record in Journal(run.path, run.run_id).records()}

    def hosts(self, name: str, part: str) -> list[str]:
        """Of every task of the jobs with this word in their names."""
        jobs = [job for job in self.jobs(name).values() if part in job.job_name]
        files = [file for job in jobs for file in Path(job.folder).glob(f"{job.job_id}_*.pid")]
        return sorted(file.read_text().split()[1] for file in files)

    def rows(self, sql: str) -> list[tuple]:
        return console.query(self.folder / "store", sql)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with ThreadPoolExecutor() as pool:
        made = pool.submit(make_demo_dataset, folder / "data", num_samples=48)
        found = Server(folder)
        made.result()
    yield found
    with contextlib.suppress(ProcessLookupError):
        found.kill()


@pytest.fixture(scope="module")
def pipelines(cluster: None, folder: Path, server: Server) -> Pipelines:
    """All three, to their ends."""
    write_config(
        folder, "first", slurm={"time_limit_min": 10}, memory_gib=0.9,
        data_profile={"num_shards": 4, "num_workers": 4},
        model_profile={"budget_s": 6, "num_probes": 4, "num_repeats": 1},
        plan={"global_batch_size": 8, "microbatch_choices": [2], "num_scenarios": 1, "top": 2},
        train={"num_steps": NUM_STEPS}, compare={"num_batches": 0},
    )  # fmt: skip
    make_environment(folder, **{name: server.env[name] for name in ("PYTHONPATH", "PREFECT_HOME", "PREFECT_API_URL")})
    logs = {name: folder / f"{name}.log" for name in ("first", "inside", "worker")}
    with Background("dflop.cli", "run", "run.yaml", log=logs["first"], cwd=folder, **server.env) as first:
        server.call("/work_pools/", "POST", name="dflop", type="process")
        server.prefect("deploy", "--all")
        assert first.process.wait(600) == 0, first.output
    with Background("prefect", "worker", "start", "--pool", "dflop", log=logs["worker"], **server.env):
        given = (f"config_path={folder / 'run.yaml'}", f"overrides={json.dumps(['name=worker'])}")
        server.prefect("deployment", "run", "dflop-pipeline/team", *(w for g in given for w in ("--param", g)))
        # The worker's run takes longest to begin; behind it the other one begins while it is at work, on any machine.
        until(lambda: [*(folder / "runs").glob("worker-*")], what="the worker's run to begin", limit_s=300)
        overrides = ("name=inside", "compare.num_batches=1", "compare.num_repeats=1")
        job_id = sbatch(folder, logs["inside"], *itertools.chain.from_iterable(("--set", o) for o in overrides))
        assert end_of(job_id, 600) == "COMPLETED", logs["inside"].read_text()
        (run,) = (folder / "runs").glob("worker-*")
        (served,) = server.call("/flow_runs/filter", "POST", flow_runs={"name": {"any_": [run.name]}})
        ended(server, served["id"], logs["worker"], limit_s=600)
    found = {name: open_run(next((folder / "runs").glob(f"{name}-*"))) for name in logs}
    flow_runs = server.call("/flow_runs/filter", "POST", flow_runs={"parent_task_run_id": {"is_null_": True}})
    states = {flow_run["name"]: flow_run["state_type"] for flow_run in flow_runs}
    return Pipelines(
        folder,
        found,
        {name: log.read_text() for name, log in logs.items()},
        {name: states.get(run.run_id, "") for name, run in found.items()},
    )


def sbatch(folder: Path, log: Path, *args: str) -> str:
    command = ["sbatch", "--parsable", f"--output={log}", REPO / "slurm" / "driver.sbatch", "run", "run.yaml", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_all_three_are_done(pipelines):
    assert pipelines.states == dict.fromkeys(pipelines.runs, "COMPLETED")
    for name, run in pipelines.runs.items():
        assert run.state()["state"] == lifecycle.DONE, pipelines.said[name]
        assert {job.state for job in pipelines.jobs(name).values()} == {"done"}
        assert (run.path / "report.html").stat().st_size > 10_000


def test_the_first_profiles_in_arrays_over_four_nodes_and_trains_on_two(pipelines):
    jobs = pipelines.jobs("first").values()
    shards = [job.job_id for job in jobs if "data" in job.job_name]
    assert sorted(job_id.partition("_")[2] for job_id in shards) == list("0123")
    assert len({job_id.partition("_")[0] for job_id in shards}) == 1
    assert sorted(pipelines.hosts("first", "data")) == [f"node{n}" for n in range(1, 5)]
    modules = [job.job_id for job in jobs if "profile-tp1-" in job.job_name]
    assert sorted(job_id.partition("_")[2] for job_id in modules) == list("012")
    assert len({job_id.partition("_")[0] for job_id in modules}) == 1
    for name in pipelines.runs:
        hosts = pipelines.hosts(name, "train")
        assert len(hosts) == pipelines.runs[name].plan().num_processes == 4
        assert len(set(hosts)) == 2


def test_the_others_find_its_profiles_and_submit_no_others(pipelines):
    for name, submitted in {"inside": ["train", "compare"], "worker": ["train"]}.items():
        said = pipelines.said[name]
        # Prefect says the first where its cache knows the profile, the step that asks the store the second.
        cached = re.findall(r"profile-(?:data|model)-\w+\W+Finished in state Cached\(type=COMPLETED\)", said)
        assert len(cached) + said.count(", reused") == 2, said
        assert [key.rpartition("/")[2] for key in pipelines.jobs(name)] == submitted
    assert pipelines.rows("select kind, count(*) from profile_record group by kind order by kind") == [
        ("data", 1), ("model", 1),
    ]  # fmt: skip


def test_runs_at_once_in_one_store_keep_their_rows_apart(pipelines):
    ids = {name: run.run_id for name, run in pipelines.runs.items()}
    trained = "run_id not like '%/compare' group by run_id"
    observed = pipelines.rows(
        f"select run_id, count(*), count(distinct (step, rank)) from step_observation where {trained}"
    )
    assert sorted(observed) == sorted((run_id, 4 * NUM_STEPS, 4 * NUM_STEPS) for run_id in ids.values())
    planned = pipelines.rows(f"select run_id, count(distinct step) from step_plan where {trained}")
    assert sorted(planned) == sorted((run_id, NUM_STEPS) for run_id in ids.values())
    at_work = pipelines.rows(
        "select min(observed_at_s), max(observed_at_s) from run_record"
        f" where run_id in ('{ids['inside']}', '{ids['worker']}') group by run_id"
    )
    assert len(at_work) == 2
    assert max(begin for begin, _ in at_work) < min(end for _, end in at_work), "they were at once"
