from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.config import ModelProfileConfig
from dflop.errors import LaunchError
from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import TRAIN
from dflop.jobs.submit import data_jobs, model_jobs, spread, train_job
from dflop.launch.payload import load_entry
from tests.jobs.configs import make_config


def on(config, num_nodes, per_node):
    cluster = config.cluster.model_copy(update={"num_nodes": num_nodes, "num_processes_per_node": per_node})
    return config.model_copy(update={"cluster": cluster})


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
def test_tasks_are_spread_over_few_nodes_evenly(tmp_path_factory, num_tasks, num_nodes, per_node):
    config = on(make_config(tmp_path_factory.getbasetemp()), num_nodes, per_node)
    if num_tasks > num_nodes * per_node:
        with pytest.raises(LaunchError, match=f"{num_tasks} processes do not fit on {num_nodes} nodes of {per_node}"):
            spread(num_tasks, config)
        return
    used, tasks_per_node = spread(num_tasks, config)
    assert used <= num_nodes
    assert tasks_per_node <= per_node
    assert (used - 1) * per_node < num_tasks, "fewer nodes would do"
    assert 0 <= used * tasks_per_node - num_tasks < used, "a node has two tasks fewer than another, or there is no room"


def test_jobs_name_their_entry_their_run_and_what_they_ask_for(tmp_path):
    config = make_config(tmp_path, "data_profile.num_shards=3", "cluster.num_nodes=2")
    run = RunDir(tmp_path / "small-1")
    shards = data_jobs(run, config, "key")
    train = train_job(run, config, TRAIN, num_processes=6)
    models = model_jobs(run, config.model_copy(update={"model_profile": ModelProfileConfig(tp=(1, 2))}), "key", "H200")
    jobs = [*shards, *models, train]
    assert [j.args for j in shards] == [(str(run.path), "key", str(i), "3") for i in range(3)]
    assert len({j.key for j in jobs}) == len({j.folder for j in jobs}) == len({j.name for j in jobs}) == 7
    assert all(j.folder.parent == run.path / "jobs" for j in jobs)
    assert all(callable(load_entry(j.entry)) for j in jobs)
    assert [j.resources.num_tasks for j in jobs] == [1, 1, 1, 1, 2, 8, 6]
    assert (train.resources.num_nodes, train.resources.tasks_per_node, train.resources.gpus_per_node) == (2, 3, 0)
    assert train.resources.memory_bytes == 3 * 2**30


def test_only_jobs_that_compute_ask_for_gpus(tmp_path):
    config = make_config(tmp_path, "cluster.device=cuda", "cluster.num_cores_per_node=64")
    run = RunDir(tmp_path / "small-1")
    (data, *_), (model, _links) = data_jobs(run, config, "key"), model_jobs(run, config, "key", "H200")
    train = train_job(run, config, TRAIN, num_processes=4)
    assert [j.resources.gpus_per_node for j in (data, model, train)] == [0, 1, 4]
    assert [j.resources.cpus_per_task for j in (data, model, train)] == [1, 16, 16]
    assert bool(data.env) != bool(train.env), "the allocator setting is for CPU tensors"


def test_a_job_of_another_run_is_another_job(tmp_path):
    config = make_config(tmp_path)
    keys = {train_job(RunDir(tmp_path / name), config, TRAIN, 4).key for name in ("a", "b")}
    assert len(keys) == 2
