import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.config import ModelProfileConfig
from dflop.errors import LaunchError
from dflop.launch.executor import batches
from dflop.launch.payload import load_entry
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.run.queue import site_of
from dflop.steps.submit import data_jobs, in_turns, model_jobs, spread, train_job
from tests.jobs.configs import make_config


def test_tasks_are_spread_over_few_nodes_evenly(tmp_path):
    config = make_config(tmp_path)

    @given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
    def spreads(num_tasks, num_nodes, per_node):
        cluster = config.cluster.model_copy(update={"num_nodes": num_nodes, "num_processes_per_node": per_node})
        asked = config.model_copy(update={"cluster": cluster})
        if num_tasks > num_nodes * per_node:
            with pytest.raises(LaunchError, match=f"{num_tasks} processes do not fit on {num_nodes} nodes of"):
                spread(num_tasks, asked)
            return
        used, tasks_per_node = spread(num_tasks, asked)
        assert used <= num_nodes
        assert tasks_per_node <= per_node
        assert (used - 1) * per_node < num_tasks, "fewer nodes would do"
        assert 0 <= used * tasks_per_node - num_tasks < used, "a node has two tasks fewer than another, or too few"

    spreads()


def test_jobs_name_their_entry_their_run_and_what_they_ask_for(tmp_path, monkeypatch):
    config = make_config(tmp_path, "data_profile.num_shards=3", "cluster.num_nodes=2")
    run = RunDir(tmp_path / "small-1")
    shards = data_jobs(run, config, "key", "slurm")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    here = data_jobs(run, config, "key", "local")
    assert len({j.key for j in (*here, *shards)}) == 2 + 3, "shards of another number are other work"
    train = train_job(run, config, TRAIN, num_processes=6)
    profiled = config.model_copy(update={"model_profile": ModelProfileConfig(tp=(1, 2))})
    jobs = [*shards, *model_jobs(run, profiled, "key", "H200", ("vision", "llm")), train]
    assert [j.args for j in shards] == [(str(run.path), "key", str(i), "3") for i in range(3)]
    assert len({j.key for j in jobs}) == len({j.name for j in jobs}) == 7
    assert len({j.folder for j in shards}) == 1, "they are one array"
    assert len({j.folder for j in jobs}) == 5
    assert all(j.folder.parent == run.path / "jobs" for j in jobs)
    assert all(callable(load_entry(j.entry)) for j in jobs)
    assert [j.resources.num_tasks for j in jobs] == [1, 1, 1, 1, 2, 8, 6]
    assert (train.resources.num_nodes, train.resources.tasks_per_node, train.resources.gpus_per_node) == (2, 3, 0)
    assert train.resources.memory_bytes == 3 * 2**30


def test_what_a_job_is_given_follows_from_what_it_does(tmp_path):
    cuda = make_config(tmp_path, "cluster.device=cuda", "cluster.num_cores_per_node=64")
    run, other = RunDir(tmp_path / "small-1"), RunDir(tmp_path / "small-2")
    (data, *_), (model,) = data_jobs(run, cuda, "key", "local"), model_jobs(run, cuda, "key", "H200", ("llm",))[:1]
    train = train_job(run, cuda, TRAIN, num_processes=4)
    assert [j.resources.gpus_per_node for j in (data, model, train)] == [0, 1, 4]
    assert [j.resources.cpus_per_task for j in (data, model, train)] == [1, 16, 16]
    assert bool(data.env) != bool(train.env), "the allocator setting is for CPU tensors"
    assert [j.is_resumable for j in (data, model, train)] == [False, False, True]
    assert train.key != train_job(other, cuda, TRAIN, 4).key
    shared = make_config(tmp_path, "cluster.device=cuda", "cluster.ranks_per_gpu=2", "cluster.num_nodes=2")
    asked = [train_job(run, shared, TRAIN, num_processes=n).resources for n in (1, 3, 6, 8)]
    assert [(r.tasks_per_node, r.gpus_per_node) for r in asked] == [(1, 1), (3, 2), (3, 2), (4, 2)]


def test_on_slurm_a_degree_is_an_array_of_modules_and_elsewhere_one_job(tmp_path):
    modules, run = ("vision", "audio", "llm"), RunDir(tmp_path / "small-1")
    here = make_config(tmp_path, "model_profile.tp=[1,2]")
    jobs = model_jobs(run, here, "key", "H200", modules)
    assert in_turns(here, jobs) == [[job] for job in jobs], "on one machine they would time each other"
    assert [j.name for j in jobs] == [f"small-1-profile-{name}" for name in ("tp1", "tp2", "links")]
    there = make_config(tmp_path, "model_profile.tp=[1,2]", "cluster.backend=slurm")
    jobs = model_jobs(run, there, "key", "H200", modules)
    assert in_turns(there, jobs) == [jobs], "all wait in the queue at once"
    one, two, links = jobs[:3], jobs[3:6], jobs[6:]
    assert [j.args for j in two] == [(str(run.path), "key", "H200", "2", module) for module in modules]
    assert {j.resources.num_tasks for j in two} == {2}
    assert {(j.array, j.folder.name) for j in one} == {("small-1-profile-tp1", "profile-tp1")}
    assert all(j.name.startswith(j.array) for j in (*one, *two))
    assert [j.array for j in links] == [""]
    assert [len(batch) for batch in batches(jobs)] == [3, 3, 1]
    alone = make_config(tmp_path, "cluster.num_processes_per_node=1")
    unwanted = make_config(tmp_path, "model_profile.links_budget_s=0")
    assert not any("links" in j.name for config in (alone, unwanted) for j in model_jobs(run, config, "", "", ("llm",)))


def test_the_cluster_file_is_the_sites_dialect(tmp_path):
    options = {
        "partition": "gpu", "account": "a1", "qos": "high", "constraint": "a100&ib", "gpus": "gres", "gpu_type": "a100",
        "ask_for_memory": "false", "requeue": "false", "signal_delay_s": 40, "max_jobs_at_once": 3,
        "extra": "{reservation: r1}", "srun_args": "['--mpi=none']",
        "container": "{image: /i.sif, mounts: ['/scratch', '/a:/b']}",
    }  # fmt: skip
    settings = (f"cluster.slurm.{name}={value}" for name, value in options.items())
    config = make_config(tmp_path, "cluster.device=cuda", "cluster.num_cores_per_node=8", *settings)
    run = RunDir(tmp_path / "runs" / "small-1")
    site, job = site_of(run, config), train_job(run, config, TRAIN, 4)
    assert (site.gpus, site.gpu_type, site.ask_for_memory, site.requeue) == ("gres", "a100", False, False)
    assert (site.signal_delay_s, site.max_jobs_at_once, site.srun_args) == (40, 3, ("--mpi=none",))
    assert job.resources.extra == {"account": "a1", "qos": "high", "constraint": "a100&ib", "reservation": "r1"}
    assert job.resources.partition == "gpu"
    mounts = site.container.mounts
    assert {str(tmp_path / "runs"), str(tmp_path / "store"), str(tmp_path / "data"), "/scratch", "/a:/b"} <= {*mounts}
    assert len(set(mounts)) == len(mounts)
